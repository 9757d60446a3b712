"""`onboard plan`: what a model takes of a GPU's memory, and what fits beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.model_argument import registered_names
from onboard.cli.options import CacheDTypeName, DTypeName, ModeName
from onboard.cli.result import Result
from onboard.errors import ConsentRequiredError, UsageError
from onboard.gpu import gib
from onboard.gpu_kinds import Gpus, known_gpus, parse_gpus

if TYPE_CHECKING:
    from rich.table import Table

    from onboard.cache.budget import MemoryPlan
    from onboard.config import RuntimeConfig


_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint folder, Hugging Face id, name in the registry, or config.json.",
    ),
]
_Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="GPU",
        help="GPU type, count or memory: H100, 4xH200, 80GiB.",
        show_default="this machine's",
    ),
]
_CacheDType = Annotated[
    CacheDTypeName | None,
    typer.Option(help="Dtype of the KV cache.", show_default="as configured"),
]
_Context = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Context length: tokens of each sequence.",
        show_default="the configuration's",
    ),
]
_Batch = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Batch size.", show_default="the configuration's"),
]
_Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="Count activations in the run's own graph instead of estimating; slower."
    ),
]
_Mode = Annotated[
    ModeName, typer.Option(help="graph: the generated model; hf: transformers' own model.")
]


def plan(
    model: _Model,
    gpu: _Gpu = None,
    dtype: options.InDType = DTypeName.AUTO,
    cache_dtype: _CacheDType = None,
    context: _Context = None,
    batch: _Batch = None,
    exact: _Exact = False,
    world_size: options.WorldSize = None,
    root: options.Root = Path(),
    mode: _Mode = ModeName.GRAPH,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> Result | None:
    """Plan GPU memory: weights, activations, and how much cache fits.

    Reads the config only, no weights. With --world-size: what each of several ranks takes, and
    what they divide.

    Exit codes: 0 it fits; 2 the request is invalid; 3 it does not fit.
    """
    gpus = None if gpu is None else parse_gpus(gpu)
    overrides = _overrides(dtype.value, mode.value, context, batch) | {"world_size": world_size}
    decides = None if exact else partial(_is_decided, model, batch)
    with registered_names(model, root):
        made, facts = _plan(model, root, gpus, overrides, cache_dtype, decides)
    problem = _problem(model, made, batch)
    if as_json:
        return Result(_document(model, made, facts), problem)
    _print(model, made, facts, problem)
    if problem:
        raise problem
    return None


def _overrides(dtype: str, mode: str, context: int | None, batch: int | None) -> dict[str, Any]:
    limits = {"max_seq_len": context, "max_batch_size": batch}
    return {
        "dtype": dtype,
        "mode": mode,
        **{key: value for key, value in limits.items() if value is not None},
    }


def _plan(
    model: str,
    root: Path,
    gpus: Gpus | None,
    overrides: dict[str, Any],
    cache_dtype: CacheDTypeName | None,
    is_decided: Callable[[MemoryPlan], bool] | None,
) -> tuple[MemoryPlan, list[str]]:
    from onboard.gpu import device_memory
    from onboard.hub import as_folder, open_source
    from onboard.runtime.fitted_plan import fitted
    from onboard.runtime.kept_plan import counted_or_kept
    from onboard.runtime.resolve import resolve_config
    from onboard.workflow.checkpoint.kept_codes import spared_bytes

    here = device_memory("auto")
    folder = root.expanduser()
    on_gpu = gpus is not None or bool(here.gpus)
    with as_folder(model) as source:
        runtime: RuntimeConfig = resolve_config(source, folder, None, overrides)
        runtime = _split(runtime, gpus, overrides)
        ranks = runtime.world_size
        asked = _each(gpus, Gpus(1, here.gpus[0].total if here.gpus else here.total), runtime)
        if cache_dtype is not None:
            runtime.kv_cache_config.dtype = cache_dtype.value
        checkpoint = open_source(runtime.model, revision=runtime.revision).files()
        divided = _ranks(checkpoint, runtime, folder, model, gpu=on_gpu)
        spared = cache(partial(spared_bytes, checkpoint) if on_gpu else _nothing_spared)
        counted, facts = counted_or_kept(
            checkpoint,
            runtime,
            gpu=on_gpu,
            root=folder,
            model=model,
            decides=is_decided
            and (
                lambda plan: is_decided(
                    plan.sparing(spared()[0] // ranks).over(asked.count, asked.memory)
                )
            ),
        )
        counted = replace(counted.sparing(spared()[0] // ranks), ranks=ranks)
        facts = [*divided, *facts, *spared()[1]]
    made, lowered = fitted(counted.over(asked.count, asked.memory))
    facts += lowered
    if asked.count > 1:
        facts.append(
            f"weights and caches are split evenly over {asked.count} GPUs here;"
            f" --world-size {asked.count} says what each of as many ranks takes"
        )
    return made, facts


def _split(
    runtime: RuntimeConfig, gpus: Gpus | None, overrides: Mapping[str, Any]
) -> RuntimeConfig:
    """Return the configuration of one rank where other GPUs are named than are registered."""
    named = gpus is not None and gpus.count not in (1, runtime.world_size)
    other = named and overrides["world_size"] is None
    return runtime.model_copy(update={"world_size": 1}) if other else runtime


def _each(gpus: Gpus | None, here: Gpus, runtime: RuntimeConfig) -> Gpus:
    """Return the GPUs that a plan is for: of several ranks each has one."""
    asked, ranks = gpus or here, runtime.world_size
    if ranks > 1 and asked.count not in (1, ranks):
        raise UsageError(
            f"--gpu names {asked.count} GPUs for {ranks} ranks", hint=f"Each has one: give {ranks}"
        )
    return asked if ranks == 1 else Gpus(1, asked.memory)


def _ranks(
    checkpoint: Path, runtime: RuntimeConfig, root: Path, model: str, *, gpu: bool
) -> list[str]:
    """Return what is said of several ranks; raise `UsageError` where they cannot divide the
    model.
    """
    if runtime.world_size == 1:
        return []
    from onboard.runtime.ranks.kept_division import find_division

    found = find_division(checkpoint, runtime, gpu=gpu, root=root, model=model)
    return [f"each of {runtime.world_size} ranks takes this; {found}", *found.facts]


def _nothing_spared() -> tuple[int, list[str]]:
    return 0, []


def _is_decided(model: str, batch: int | None, plan: MemoryPlan) -> bool:
    """Whether it fits, or does not, wherever between their bounds its sizes are."""
    from onboard.runtime.fitted_plan import fitted

    most, least = (_problem(model, fitted(each)[0], batch) is None for each in (plan, plan.least()))
    return most == least


def _problem(model: str, plan: MemoryPlan, batch: int | None) -> ConsentRequiredError | None:
    """Return what does not fit: the model, one sequence, or the batch that was asked for."""
    limits, memory = plan.limits, gib(plan.memory)
    if plan.left <= 0:
        return ConsentRequiredError(
            f"{model} does not fit in {memory}: it takes {gib(plan.fixed)} without any cache",
            hint=_way_to_fit(plan),
        )
    longest = plan.longest_context()
    if not plan.fits_one():
        return ConsentRequiredError(
            f"a sequence of {limits.max_seq_len:,} tokens does not fit in {memory} beside {model}",
            hint=f"The longest that does has {longest:,}" if longest else _way_to_fit(plan),
        )
    if batch is not None and not plan.fits():
        return ConsentRequiredError(
            f"{batch:,} sequences of {limits.max_seq_len:,} tokens do not fit in {memory} beside {model}",
            hint=f"At most {plan.largest_batch(limits.max_seq_len):,} do",
        )
    return None


def _way_to_fit(plan: MemoryPlan) -> str:
    """Return the smallest kind of GPU of which the fewest are enough, in words."""
    needed = {
        name: count for name, size in known_gpus().items() if (count := plan.devices_needed(size))
    }
    if not needed and plan.ranks > 1:
        return "No known GPU holds a rank: ask for more ranks, or for fewer or shorter sequences"
    if not needed:
        return (
            "No known number of GPUs is enough for these sequences: ask for fewer or shorter ones"
        )
    fewest = min(needed.values())
    name = next(name for name, count in needed.items() if count == fewest)
    return f"These sequences need {fewest} x {name}" if fewest > 1 else f"One {name} is enough"


def _document(model: str, plan: MemoryPlan, facts: list[str]) -> dict[str, Any]:
    sizes = {key: value for key, value in asdict(plan).items() if key != "cache"}
    groups = [
        {"form": group.form, "caches": group.caches, "units": group.units, "bytes": group.num_bytes}
        for group in plan.cache.groups(plan.pages)
    ]
    fits = [
        {"context": c, "batch": plan.largest_batch(c), "bytes_each": plan.sequence_bytes(c)}
        for c in plan.ladder()
    ]
    return {
        "model": model,
        **sizes,
        "limits": asdict(plan.limits),
        "pages": plan.pages,
        "caches": plan.caches,
        "groups": groups,
        "total": plan.total,
        "fits": plan.fits(),
        "largest_batches": fits,
        "gpus_needed": {name: plan.devices_needed(size) for name, size in known_gpus().items()},
        "facts": facts,
    }


def _print(
    model: str, plan: MemoryPlan, facts: list[str], problem: ConsentRequiredError | None
) -> None:
    from rich.console import Console
    from rich.text import Text

    limits, console = plan.limits, Console(highlight=False)
    console.print(
        Text(
            f"{model}: {limits.max_batch_size:,} sequences of {limits.max_seq_len:,} tokens",
            style="bold",
        )
    )
    console.print(_memory_table(plan))
    if not plan.fits() and problem is None:
        most = plan.largest_batch(limits.max_seq_len)
        console.print(f"Of these sequences {most:,} can be that long at a time; others wait.")
    if plan.left > 0:
        console.print(_fitting_table(plan))
    console.print(Text(_kinds(plan)))
    for fact in facts:
        console.print(Text(f"note: {fact}", style="dim"))


def _kinds(plan: MemoryPlan) -> str:
    """Return how many GPUs of each known kind all sequences need, in one sentence."""
    words = ", ".join(filter(None, (_count(plan, *kind) for kind in known_gpus().items())))
    batch, context = plan.wanted or (plan.limits.max_batch_size, plan.limits.max_seq_len)
    asked = (
        f"{batch:,} sequences of {context:,} tokens"
        if batch > 1
        else f"a sequence of {context:,} tokens"
    )
    none = "more than 64 of any kind" if plan.ranks == 1 else "none of any kind holds a rank"
    return f"GPUs for {asked}: {words or none}"


def _count(plan: MemoryPlan, name: str, size: int) -> str:
    """Return how many GPUs of a kind are needed, where bounds differ from how many on."""
    count, least = plan.devices_needed(size), plan.least().devices_needed(size)
    if least == count or plan.ranks > 1:
        return f"{count} x {name}" if count else ""
    return f"{least} to {count or 'more'} x {name}"


def _memory_table(plan: MemoryPlan) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_footer=True)
    table.add_column("takes", "total")
    table.add_column("of", "")
    table.add_column("size", gib(plan.total), justify="right")
    table.add_column("", f"{plan.total / plan.memory:.0%} of {gib(plan.memory)}", justify="left")
    for name, detail, size in _rows(plan):
        table.add_row(name, detail, gib(size), _bar(size / plan.memory))
    return table


def _rows(plan: MemoryPlan) -> list[tuple[str, str, int]]:
    groups = plan.cache.groups(plan.pages)
    rows = [
        ("weights", f"{plan.parameters:,} parameters", plan.weights),
        ("towers", "for images or sound", plan.towers),
        ("tables", "buffers", plan.tables),
        *(
            ("states" if each.resource.by_sequence else "cache", _group(each), each.num_bytes)
            for each in groups
        ),
        (
            f"activations{', at most' * (plan.span > 1)}",
            f"a step of {plan.step_tokens:,} tokens",
            plan.activations + plan.inputs,
        ),
        ("CUDA graphs", "decode steps", plan.graphs),
        ("reserve", "driver and libraries, an estimate", plan.reserve),
    ]
    return [row for row in rows if row[2]]


def _group(group: Any) -> str:
    """Return how many caches there are of a kind, what each has, and how many tokens or sequences
    it holds.
    """
    caches, size = f"{group.caches} cache{'s' if group.caches > 1 else ''}", group.resource
    if size.by_sequence:
        return f"{caches} of {group.form}: {group.units:,} slots"
    return f"{caches} of {group.form}: {group.units:,} pages of {size.page_size} tokens"


def _bar(share: float, width: int = 24) -> str:
    """Return a bar in eighths of a character, as long as `width` at most: one that is longer would
    take the table's words their room.
    """
    eighths = max(0, round(min(share, 1) * width * 8))
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _fitting_table(plan: MemoryPlan) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column("context", justify="right")
    table.add_column("cache of a sequence", justify="right")
    table.add_column("sequences that fit", justify="right")
    for context in plan.ladder():
        chosen = "bold" if context == plan.limits.max_seq_len else ""
        batch = plan.largest_batch(context)
        size = gib(plan.sequence_bytes(context))
        table.add_row(f"{context:,}", size, f"{batch:,}" if batch else "none", style=chosen)
    return table

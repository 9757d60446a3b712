"""`onboard plan`: what a model takes of a GPU's memory, and what fits beside it."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.names import registered_names
from onboard.cli.options import CacheDTypeName, DTypeName, ModeName
from onboard.cli.result import Result
from onboard.errors import ConsentRequiredError, UsageError
from onboard.hub import go_offline

if TYPE_CHECKING:
    from rich.table import Table

    from onboard.config import RuntimeConfig
    from onboard.graph.plan import MemoryPlan

_UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "tib": 2**40, "tb": 10**12}


def plan(
    model: options.Model,
    gpu: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the GPU, as 80GiB.", show_default="this machine's")
    ] = None,
    dtype: options.InDType = DTypeName.AUTO,
    cache_dtype: Annotated[
        CacheDTypeName | None,
        typer.Option(help="What keys and values are kept in.", show_default="as configured"),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="the configuration's")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences at a time.", show_default="the configuration's")
    ] = None,
    root: options.Root = Path(),
    mode: Annotated[ModeName, typer.Option(help="graph: the onboarded model; hf: transformers' own.")] = ModeName.GRAPH,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> Result | None:
    """Plan memory: what a model takes of a GPU, and what fits beside it.

    Its config alone is read.

    Exit codes: 0 it fits; 2 cannot be done as asked; 3 it does not fit.
    """
    if offline:
        go_offline()
    memory = None if gpu is None else parse_size(gpu)
    overrides = _overrides(dtype.value, mode.value, context, batch)
    with registered_names(model, root):
        made, facts = _plan(model, root, memory, overrides, cache_dtype)
    problem = _problem(model, made, batch)
    if as_json:
        return Result(_document(model, made, facts), problem)
    if problem:
        raise problem
    _print(model, made, facts)
    return None


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 80GiB, 80GB or 40960MiB; a number alone is GiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or (found[2] and found[2] not in _UNITS) or not float(found[1]):
        raise UsageError(f"{text!r} is no size", hint="Write it as 80GiB, 80GB or 40960MiB")
    return int(float(found[1]) * _UNITS[found[2] or "gib"])


def _overrides(dtype: str, mode: str, context: int | None, batch: int | None) -> dict[str, Any]:
    limits = {"max_seq_len": context, "max_batch_size": batch}
    return {"dtype": dtype, "mode": mode, **{key: value for key, value in limits.items() if value is not None}}


def _plan(
    model: str, root: Path, memory: int | None, overrides: dict[str, Any], cache_dtype: CacheDTypeName | None
) -> tuple[MemoryPlan, list[str]]:
    from onboard.gpu import device_memory
    from onboard.hub import open_source
    from onboard.runtime.plan import plan_memory
    from onboard.runtime.resolve import resolve_config

    here = device_memory("auto")
    folder = root.expanduser()
    runtime: RuntimeConfig = resolve_config(model, folder, None, overrides)
    if cache_dtype is not None:
        runtime.kv_cache_config.dtype = cache_dtype.value
    checkpoint = open_source(runtime.model, revision=runtime.revision).files()
    size = memory or (here.gpus[0].total if here.gpus else here.total)
    on_gpu = memory is not None or bool(here.gpus)
    return plan_memory(checkpoint, runtime, size, gpu=on_gpu, root=folder, model=model)


def _problem(model: str, plan: MemoryPlan, batch: int | None) -> ConsentRequiredError | None:
    """Return what does not fit: the model, one sequence, or the batch that was asked for."""
    limits, memory = plan.limits, gib(plan.memory)
    if plan.left <= 0:
        return ConsentRequiredError(
            f"{model} does not fit in {memory}: it takes {gib(plan.fixed)} without any cache",
            hint="Use a larger GPU or a smaller dtype",
        )
    longest = plan.longest_context()
    if not plan.fits_one():
        return ConsentRequiredError(
            f"a sequence of {limits.max_seq_len:,} tokens does not fit in {memory} beside {model}",
            hint=f"The longest that does has {longest:,}" if longest else "Use a larger GPU",
        )
    if batch is not None and not plan.fits():
        return ConsentRequiredError(
            f"{batch:,} sequences of {limits.max_seq_len:,} tokens do not fit in {memory} beside {model}",
            hint=f"At most {plan.largest_batch(limits.max_seq_len):,} do",
        )
    return None


def gib(size: float) -> str:
    """Return a size in GiB or, when small, in MiB, with three digits."""
    value, unit = (size / 2**30, "GiB") if abs(size) >= 2**30 else (size / 2**20, "MiB")
    return f"{value:,.{max(0, 2 - len(str(int(abs(value)))) + 1)}f} {unit}"


def _document(model: str, plan: MemoryPlan, facts: list[str]) -> dict[str, Any]:
    sizes = {key: value for key, value in asdict(plan).items() if key != "cache"}
    groups = [
        {"form": group.form, "caches": group.caches, "units": group.units, "bytes": group.num_bytes}
        for group in plan.cache.groups(plan.pages)
    ]
    fits = [{"context": c, "batch": plan.largest_batch(c), "bytes_each": plan.sequence_bytes(c)} for c in plan.ladder()]
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
        "facts": facts,
    }


def _print(model: str, plan: MemoryPlan, facts: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    limits, console = plan.limits, Console(highlight=False)
    console.print(Text(f"{model}: {limits.max_batch_size:,} sequences of {limits.max_seq_len:,} tokens", style="bold"))
    console.print(_memory_table(plan))
    if not plan.fits():
        most = plan.largest_batch(limits.max_seq_len)
        console.print(f"Of these sequences {most:,} can be that long at a time; others wait.")
    console.print(_fitting_table(plan))
    for fact in facts:
        console.print(Text(f"note: {fact}", style="dim"))


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
        ("tables", "buffers", plan.tables),
        *(("states" if each.resource.by_sequence else "cache", _group(each), each.num_bytes) for each in groups),
        ("activations", f"a step of {plan.step_tokens:,} tokens", plan.activations + plan.inputs),
        ("CUDA graphs", "decode steps", plan.graphs),
        ("reserve", "driver and libraries, an estimate", plan.reserve),
    ]
    return [row for row in rows if row[2]]


def _group(group: Any) -> str:
    units = "slots" if group.resource.by_sequence else f"pages of {group.resource.page_size}"
    return f"{group.caches} of {group.form}: {group.units:,} {units}"


def _bar(share: float, width: int = 24) -> str:
    """Return a bar in eighths of a character."""
    eighths = max(0, round(share * width * 8))
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

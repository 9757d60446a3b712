"""`onboard sweep`: onboard many architectures, each as a tiny random checkpoint, and show what
works.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onboard.cli.options import Device, ModeName
from onboard.cli.result import Result
from onboard.errors import UsageError

if TYPE_CHECKING:
    from onboard.workflow.sweep.coverage import Coverage
    from onboard.workflow.sweep.executors import Executor
    from onboard.workflow.sweep.inputs.targets import Target
    from onboard.workflow.sweep.sweep import Sweep
    from onboard.workflow.sweep.target_record import Entry


class ExecutorName(StrEnum):
    """Where models are onboarded."""

    LOCAL = "local"
    RAY = "ray"


_Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Model types, registry names, ids, folders, or files that list these line by line.",
    ),
]
_AllTransformers = Annotated[
    bool,
    typer.Option("--all-transformers", help="All causal language model types of transformers."),
]
_Types = Annotated[str | None, typer.Option(metavar="A,B,...", help="Only these types of them.")]
_Variants = Annotated[
    bool | None,
    typer.Option(
        "--variants/--no-variants",
        help="Test each type twice: also with other sizes, layer orders and options.",
        show_default="with --all-transformers",
    ),
]
_Root = Annotated[
    Path,
    typer.Option(
        help="Root folder: all files are written under it.", file_okay=False, show_default="here"
    ),
]
_Device = Annotated[Device, typer.Option(help="Device to run the models on.")]
_Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Models to run in parallel.", show_default="one a core or GPU"
    ),
]
_Executor = Annotated[
    ExecutorName,
    typer.Option(
        help="local: on this machine; ray: spread over the cores or GPUs of a Ray cluster."
    ),
]
_Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the Ray cluster.",
        show_default="RAY_ADDRESS, or one started on this machine",
    ),
]
_Mode = Annotated[
    ModeName,
    typer.Option(
        help="graph: onboard; hf, transformers: run transformers' own model, without a file."
    ),
]
_Until = Annotated[str, typer.Option(metavar="PHASE", help="Stop each model after this phase.")]
_LimitSeconds = Annotated[float, typer.Option(help="Time limit for each model, in seconds.")]
_LimitMemory = Annotated[
    float, typer.Option(metavar="GIB", help="Memory limit for each process, in GiB.")
]
_WorldSize = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Ranks on which the judge runs what was onboarded."),
]
_Table = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write what the judge measured, as a Markdown table."),
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Also rerun what has not changed.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the coverage as one JSON document.")]


def sweep(
    models: _Models = None,
    all_transformers: _AllTransformers = False,
    types: _Types = None,
    variants: _Variants = None,
    root: _Root = Path(),
    device: _Device = Device.CPU,
    jobs: _Jobs = None,
    executor: _Executor = ExecutorName.LOCAL,
    address: _Address = None,
    mode: _Mode = ModeName.GRAPH,
    until: _Until = "pull_request",
    limit_seconds: _LimitSeconds = 600.0,
    limit_memory: _LimitMemory = 8.0,
    world_size: _WorldSize = 1,
    table: _Table = None,
    fresh: _Fresh = False,
    as_json: _AsJson = False,
) -> Result | None:
    """Onboard many architectures as tiny checkpoints; show what works.

    Checkpoints have random weights, and each runs in its own process. A separate judge process then
    compares the result with transformers on new prompts. Run the command again to resume: entries
    that ended with the same code and versions are skipped. With --all-transformers it writes
    registry/coverage.json, docs/coverage.md and docs/coverage.svg.
    """
    from onboard.workflow.sweep.sweep import Sweep, SweepOptions

    chosen = _chosen(device)
    options = SweepOptions(
        until, mode.value, chosen, limit_seconds, limit_memory, fresh, world_size
    )
    targets = _targets(
        models or [],
        all_transformers,
        types,
        all_transformers if variants is None else variants,
        root,
    )
    todo = Sweep(targets, root.expanduser().resolve(), options)
    entries, interrupted = _run(todo, _executor(executor, chosen, jobs, address, world_size))
    coverage = _coverage(todo, entries)
    whole = all_transformers and types is None and world_size == 1 and coverage.is_whole
    written = todo.root if whole else None
    _write(coverage, written, shown=not as_json)
    _write_table(coverage, table)
    return _end(coverage, KeyboardInterrupt() if interrupted else None, as_json=as_json)


def _end(coverage: Coverage, error: KeyboardInterrupt | None, *, as_json: bool) -> Result | None:
    if as_json:
        return Result(coverage.model_dump(mode="json"), error)
    if error:
        raise error
    return None


def _chosen(device: Device) -> str:
    from onboard.gpu import list_gpus

    return "cuda" if device is Device.CUDA or (device is Device.AUTO and list_gpus()) else "cpu"


def _targets(
    models: list[str], all_transformers: bool, types: str | None, variants: bool, root: Path
) -> list[Target]:
    from onboard.workflow.sweep.inputs.targets import Target, causal_types, check_types, resolve

    if types is not None and not all_transformers:
        raise UsageError(
            "--types chooses among --all-transformers",
            hint="Name types without an option otherwise",
        )
    names = check_types(types.split(",")) if types else causal_types() if all_transformers else []
    found = {
        target.name: target
        for target in [*(Target(name=name) for name in names), *resolve(models, root)]
    }
    if not found:
        raise UsageError(
            "there is nothing to sweep over", hint="Name models, or use --all-transformers"
        )
    second = (
        [target.model_copy(update={"variant": "varied"}) for target in found.values()]
        if variants
        else []
    )
    return [*found.values(), *second]


def _executor(
    name: ExecutorName, device: str, jobs: int | None, address: str | None, world_size: int
) -> Executor:
    from onboard.workflow.sweep.executors import local_executor
    from onboard.workflow.sweep.ray_executor import ray_executor

    if name is ExecutorName.RAY:
        return ray_executor(device, jobs, address)
    if address is not None:
        raise UsageError("--address is that of a Ray cluster", hint="Use it with --executor ray")
    return local_executor(device, jobs, world_size)


def _run(todo: Sweep, executor: Executor) -> tuple[list[Entry], bool]:
    """Return the entries, and whether an interrupt cut the list short."""
    from onboard.cli.sweep_progress import sweep_progress

    entries: list[Entry] = []
    with sweep_progress(len(todo.targets)) as progress:
        try:
            for entry, ran in todo.run(executor, lambda job: progress.started(job.target.label)):
                entries.append(entry)
                progress.finished(entry, ran)
        except KeyboardInterrupt:
            return entries, True
    return entries, False


def _coverage(todo: Sweep, entries: list[Entry]) -> Coverage:
    from onboard.workflow.run_state import current_versions
    from onboard.workflow.sweep.coverage import Coverage, ordered
    from onboard.workflow.sweep.inputs.targets import VARIANTS

    options = todo.options
    return Coverage(
        versions=current_versions(),
        source_hash=todo.source,
        device=options.device,
        mode=options.mode,
        until=options.until,
        limits={"seconds": options.seconds, "gibibytes": options.gibibytes},
        asked=len(todo.targets),
        variants=[
            name for name in VARIANTS if any(target.variant == name for target in todo.targets)
        ],
        entries=ordered(entries),
    )


def _write(coverage: Coverage, root: Path | None, *, shown: bool) -> None:
    """Write the files when there is a `root` for them; print the summary when it is to be
    `shown`.
    """
    from onboard.workflow.sweep.coverage_document import write_coverage

    written = write_coverage(coverage, root) if root is not None else []
    if not shown:
        return
    print("\n".join(f"{status:<12}{count}" for status, count in coverage.counts().items()))
    print(coverage.summary())
    if coverage.is_partial:
        print(f"partial: {len(coverage.entries)} of {coverage.asked}")
    for path in written:
        print(path)


def _write_table(coverage: Coverage, path: Path | None) -> None:
    from onboard.workflow.files import write_atomically
    from onboard.workflow.sweep.coverage_document import judged_table

    if path is not None:
        write_atomically(path, judged_table(coverage))

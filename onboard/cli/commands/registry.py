"""`onboard registry`: what the registry has, whether it is sound, and runs of its entries."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli.options import AsJson, Device, Offline, WorldSize
from onboard.cli.result import Document
from onboard.errors import OnboardError, UsageError

if TYPE_CHECKING:
    from onboard.registry import RegistryEntry
    from onboard.workflow.registry_results import Result

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="List, check and run the models of the registry.",
)

Root = Annotated[
    Path, typer.Option(help="Root folder with the registry.", file_okay=False, show_default="here")
]
Filter = Annotated[
    str,
    typer.Option(
        "--filter",
        metavar="EXPR",
        help="Only entries that match all terms, as 'family=A,B status!=passed'.",
    ),
]


@app.command("list")
def list_entries(
    root: Root = Path(), expression: Filter = "", as_json: AsJson = False
) -> Document | None:
    """List the entries and the results of their last runs.

    A filter has terms FIELD=WORD, FIELD!=WORD, FIELD~PATTERN or FIELD!~PATTERN; words separated by
    commas are alternatives. Fields: name, config_id, family, architecture, status, tested and note.
    """
    entries = _chosen(root, [], expression)
    if as_json:
        return Document([entry.model_dump(mode="json", exclude_none=True) for entry in entries])
    for entry in entries:
        ended = f"{entry.status} {entry.tested or ''}".strip()
        print(
            f"{entry.name}  {entry.family or '-'}  {ended}{f'  ({entry.note})' if entry.note else ''}"
        )
    return None


@app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of an entry, or its model's id or folder.")
    ],
    root: Root = Path(),
    resolved: Annotated[
        bool,
        typer.Option(
            "--resolved", help="Show the composed configuration and the file of each value."
        ),
    ] = False,
    as_json: AsJson = False,
) -> Document | None:
    """Show an entry; with --resolved its composed configuration."""
    from onboard.composition import compose, layers, origins, without_effect

    entry, root = _entry(name, root), root.expanduser()
    document: dict[str, Any] = {"entry": entry.model_dump(mode="json", exclude_none=True)}
    if resolved:
        found = layers(entry, root)
        document["resolved"] = compose(entry, root).model_dump(mode="json", exclude_unset=True)
        document["from"], document["without_effect"] = origins(found), without_effect(found)
    if as_json:
        return Document(document)
    for key, value in document["entry"].items():
        print(f"{key}: {', '.join(value) if isinstance(value, list) else value}")
    for key, file in document.get("from", {}).items():
        print(f"  {key}: {json.dumps(_value(document['resolved'], key))}  # {file}")
    for file in document.get("without_effect", []):
        print(f"note: {file} changes nothing: later files say something else of all that it says")
    return None


@app.command("validate")
def validate(root: Root = Path(), as_json: AsJson = False) -> Document | int:
    """Check that every entry's configs form a valid configuration.

    Exit code 1 if a config is missing or invalid.
    """
    from onboard.composition import compose, layers, without_effect
    from onboard.registry import load_standalone

    root, problems = root.expanduser(), {}
    for entry in _entries(root):
        try:
            compose(entry, root)
            load_standalone(_standalone(entry, root))
            problems[entry.name] = [
                f"{file} changes nothing" for file in without_effect(layers(entry, root))
            ]
        except OnboardError as error:
            problems[entry.name] = [f"error: {error}"]
    found = {name: said for name, said in problems.items() if said}
    code = int(any(line.startswith("error") for said in found.values() for line in said))
    if as_json:
        return Document({"entries": len(problems), "problems": found}, code)
    lines = [f"{name}: {line}" for name, said in found.items() for line in said]
    print("\n".join([*lines, f"{len(problems)} entries"]))
    return code


_Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Names of entries.", show_default="all"),
]
_Device = Annotated[Device, typer.Option(help="Device to run the models on.")]
_Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Entries to run in parallel.", show_default="1, or one a GPU"
    ),
]
_Reduced = Annotated[
    bool, typer.Option("--reduced", help="Run with few layers, at least one of each kind.")
]
_Changed = Annotated[
    bool,
    typer.Option(
        "--changed",
        help="Only entries whose model file, config or program changed since their last run.",
    ),
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Also rerun entries that passed unchanged.")]
_LimitSeconds = Annotated[float, typer.Option(help="Time limit for each entry, in seconds.")]


@app.command("run")
def run(
    names: _Names = None,
    root: Root = Path(),
    expression: Filter = "",
    device: _Device = Device.AUTO,
    jobs: _Jobs = None,
    reduced: _Reduced = False,
    changed: _Changed = False,
    fresh: _Fresh = False,
    world_size: WorldSize = None,
    limit_seconds: _LimitSeconds = 3600.0,
    offline: Offline = False,
    as_json: AsJson = False,
) -> Document | int:
    """Run entries and compare them with transformers.

    Each entry runs in its own process: on a free GPU, or on the CPU with --jobs in parallel; with
    --world-size on so many of them as ranks, which has rows of its own.
    Results are rows of registry/results.jsonl, from which the support matrix is made. An entry that
    passed with the same model file, config and program is skipped, so an interrupted run can be
    resumed. Exit code 1 if an entry fails. The filter is that of `registry list`.
    """
    from onboard.workflow.registry_runs.places import CpuPlaces, GpuPlaces
    from onboard.workflow.registry_runs.runner import Runner, RunSettings

    root = root.expanduser().resolve()
    entries, gpus, each = _chosen(root, names or [], expression), _gpus(device), world_size or 1
    if 0 < gpus < each:
        here = "is 1 GPU" if gpus == 1 else f"are {gpus} GPUs"
        raise UsageError(f"there {here} here, not {each}", hint="Use --device cpu")
    settings = RunSettings(
        "cuda" if gpus else "cpu",
        jobs or gpus // each or 1,
        reduced,
        changed,
        fresh,
        limit_seconds,
        offline,
        world_size,
    )
    progress = _Progress(len(entries))
    places = GpuPlaces(each=each) if gpus else CpuPlaces()
    runner = Runner(root, places, settings, progress)
    todo = runner.todo(entries)
    progress.total = len(todo)
    print(f"{len(todo)} of {len(entries)} entries to run", file=sys.stderr)
    rows = []
    for row, ran in runner.run(todo):
        progress.finished(row, ran)
        rows.append(row)
    code = int(any(row.status == "failed" for row in rows))
    if as_json:
        return Document([row.model_dump(mode="json", exclude_defaults=True) for row in rows], code)
    _say_counts(rows)
    return code


def _say_counts(rows: list[Result]) -> None:
    """Print how many rows passed and failed."""
    counts = {status: sum(row.status == status for row in rows) for status in ("passed", "failed")}
    print("\n".join(f"{count} {status}" for status, count in counts.items()))


@dataclass
class _Progress:
    """Writes a line for each thing that happens, to stderr."""

    total: int
    done: int = 0

    def waiting(self, name: str, why: str) -> None:
        _say(f"{name} waits: {why}")

    def started(self, name: str, log: Path) -> None:
        _say(f"{name} runs, log {log}")

    def finished(self, row: Result, ran: bool) -> None:
        self.done += 1
        figures = [f"{row.tokens_per_second:.0f} tokens/s"] if row.tokens_per_second else []
        figures += [f"{row.seconds:.0f} s"] if row.seconds is not None and ran else []
        said = ", ".join(
            [f"{row.status}{row.on_ranks}" if ran else f"{row.status} by another run", *figures]
        )
        _say(
            f"[{self.done}/{self.total}] {row.name}: {said}{f': {row.error}' if row.error else ''}"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _entries(root: Path) -> list[RegistryEntry]:
    from onboard.registry import load_entries, models_path

    if not models_path(root).exists():
        raise OnboardError(
            f"there is no registry under {root}",
            hint="Onboard a model there: onboard MODEL --root DIR",
        )
    return load_entries(root)


def _chosen(root: Path, names: list[str], expression: str) -> list[RegistryEntry]:
    from onboard.workflow.registry_runs.chosen_entries import chosen

    return chosen(_entries(root.expanduser()), names, expression)


def _entry(name: str, root: Path) -> RegistryEntry:
    from onboard.config import suggest
    from onboard.registry import all_entries, find_entry

    root = root.expanduser()
    if (entry := find_entry(name, root)) is None:
        raise UsageError(
            f"{name} is not in the registry",
            hint=suggest(name, [e.name for e in all_entries(root)], "onboard registry list"),
        )
    return entry


def _standalone(entry: RegistryEntry, root: Path) -> Path:
    from onboard.registry import config_file

    return config_file(entry.standalone, root)


def _value(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _gpus(device: Device) -> int:
    from onboard.gpu import list_gpus

    count = 0 if device is Device.CPU else len(list_gpus())
    if device is Device.CUDA and not count:
        raise UsageError("there is no GPU here", hint="Use --device cpu")
    return count

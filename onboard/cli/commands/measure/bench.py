"""`onboard bench`: how fast a model is, beside what the hardware allows and beside transformers."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.model_argument import check_config, registered_names
from onboard.cli.options import Device, DTypeName, ModeName
from onboard.cli.result import Result
from onboard.cli.setting_options import settings_of
from onboard.errors import UsageError
from onboard.verify.seeds import fresh_seed

if TYPE_CHECKING:
    from onboard.bench.subject import Subject
    from onboard.bench.whole_measurement import Report, Settings

_DEFAULTS = {"cuda": ("1,8,32,64,128", "128,1024,8192", 129), "cpu": ("1,4", "64", 17)}
"""Batches, contexts and tokens to generate, by device."""


_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint folder, Hugging Face id, name in the registry, or config.json.",
    ),
]
_Batch = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Batch sizes.", show_default="by device"),
]
_Context = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Prompt lengths, in tokens.", show_default="by device"),
]
_OutputLen = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=2, help="Tokens to generate for each prompt.", show_default="by device"
    ),
]
_Repeats = Annotated[int, typer.Option(metavar="N", min=1, help="Measurements of each shape.")]
_Compare = Annotated[
    str,
    typer.Option(
        metavar="PEER,...", help="Also measure transformers: hf, hf-compiled.", show_default="none"
    ),
]
_Profile = Annotated[bool, typer.Option("--profile", help="Draw the kernels of one decode step.")]
_Acceptance = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        min=0.0,
        max=1.0,
        help="Also measure with drafts each of whose tokens is right with this chance.",
        show_default="none",
    ),
]
_Seed = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Seed of the random prompts.", show_default="random"),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for bench.json and the pictures.",
        show_default="under the root",
    ),
]


def bench(
    model: _Model,
    root: options.Root = Path(),
    config: options.Config = None,
    device: options.OnDevice = Device.AUTO,
    dtype: options.InDType = DTypeName.AUTO,
    mode: options.Mode = ModeName.GRAPH,
    random_weights: options.RandomWeights = False,
    batch: _Batch = None,
    context: _Context = None,
    output_len: _OutputLen = None,
    repeats: _Repeats = 3,
    compare: _Compare = "",
    profile: _Profile = False,
    draft: options.Draft = None,
    acceptance: _Acceptance = None,
    world_size: options.WorldSize = None,
    seed: _Seed = None,
    output: _Output = None,
    revision: options.Revision = None,
    set_: options.Set = None,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> Result | None:
    """Measure speed against the hardware's limits and transformers.

    Prompts are random tokens; decoding is greedy. Writes bench.json, roofline.svg and startup.svg.
    """
    drafter = "ngram" if draft is None and acceptance is not None else draft
    own = settings_of(set_, revision=revision, world_size=world_size, speculative__draft=drafter)
    overrides = {"device": device.value, "dtype": dtype.value, "mode": mode.value}
    with registered_names(model, root):
        check_config(model, root, config, overrides, own, may_be_file=True)
        settings = _settings(
            device.value, batch, context, output_len, repeats, compare, seed, profile, acceptance
        )
        subject = _subject(model, root.expanduser(), config, overrides, random_weights, own)
        report = _measure(subject, settings)
    return _show(report, output or _folder(root.expanduser(), model), as_json=as_json)


def _settings(
    device: str,
    batch: str | None,
    context: str | None,
    output_len: int | None,
    repeats: int,
    compare: str,
    seed: int | None,
    profile: bool,
    acceptance: float | None,
) -> Settings:
    from onboard.bench.peer_names import parse_peers
    from onboard.bench.shape import grid

    peers = parse_peers(compare)
    given = {"batch": batch, "context": context}
    chosen = {name: numbers(name, text) for name, text in given.items() if text is not None}
    # From here on torch is there: what was typed wrong is found before.
    from onboard.bench.whole_measurement import Settings
    from onboard.runtime.build import resolve_device

    batches, contexts, tokens = _DEFAULTS[resolve_device(device).type]
    sizes = {"batch": numbers("batch", batches), "context": numbers("context", contexts), **chosen}
    seed = fresh_seed() if seed is None else seed
    shapes = grid(sizes["batch"], sizes["context"], output_len or tokens)
    return Settings(shapes, seed, repeats, peers, profile, acceptance)


def _subject(
    model: str,
    root: Path,
    config: Path | None,
    overrides: dict[str, Any],
    random_weights: bool,
    own: dict[str, Any],
) -> AbstractContextManager[Subject]:
    from onboard.bench.subject import open_subject

    return open_subject(
        model, root, config=config, overrides=overrides, random_weights=random_weights, settings=own
    )


def _measure(opened: AbstractContextManager[Subject], settings: Settings) -> Report:
    from onboard.bench.whole_measurement import run_suite

    _say(f"seed {settings.seed}")
    with opened as subject:
        return run_suite(subject, settings, _say)


def _show(report: Report, folder: Path, *, as_json: bool) -> Result | None:
    from onboard.bench.report_document import document

    made = document(report)
    files = _write(report, made, folder)
    if as_json:
        return Result(made)
    from onboard.cli.bench_tables import show

    show(made)
    print(f"wrote {', '.join(path.name for path in files)} to {folder}")
    return None


def numbers(name: str, text: str) -> list[int]:
    """Return the numbers of a comma-separated list, each once, ascending."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(
            f"--{name} {text!r} is not a list of numbers", hint="Write it as 1,8,32"
        ) from None
    if numbers[0] < 1:
        raise UsageError(f"--{name} has {numbers[0]}", hint="Numbers start at 1")
    return numbers


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _folder(root: Path, model: str) -> Path:
    from onboard.workflow.phase_runner import work_folder

    return work_folder(root, model) / "bench"


def _write(report: Report, made: dict[str, Any], folder: Path) -> list[Path]:
    """Write the document and the pictures; return their paths."""
    from onboard.bench.drawing.pictures import roofline, timeline
    from onboard.bench.drawing.profile_picture import picture

    texts = {"bench.json": json.dumps(made, indent=2) + "\n", "startup.svg": timeline(report)}
    if any(result.measured for result in report.results):
        texts["roofline.svg"] = roofline(report)
    for result in report.results:
        if result.profile is not None and result.measured is not None:
            name = f"batch {result.shape.batch}, context {result.shape.context}"
            step = f"{1e3 * result.measured.decode_step:.3f} ms when not recorded"
            title = f"{report.subject.name}: a decode step of {name}, {step}"
            file = f"decode_{result.shape.batch}_{result.shape.context}.svg"
            texts[file] = picture(result.profile, title, report.made)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]

"""`onboard tune`: the quickest back ends and CUDA-graph sizes for a model on this machine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.commands.measure.bench import numbers
from onboard.cli.options import Device, DTypeName
from onboard.cli.result import Result
from onboard.cli.terminal import one_line
from onboard.verify.seeds import fresh_seed

if TYPE_CHECKING:
    from onboard.bench.tuning.tune import Trial, Tuning


def tune(
    model: options.Model,
    root: options.Root = Path(),
    config: Annotated[
        Path | None,
        typer.Option(
            help="Configuration file to tune, or to create.", show_default="the registered one"
        ),
    ] = None,
    device: options.OnDevice = Device.AUTO,
    dtype: options.InDType = DTypeName.AUTO,
    random_weights: options.RandomWeights = False,
    batch: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Batch sizes.", show_default="one, and the most"),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Prompt lengths, in tokens.",
            show_default="128, or what the model reads",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="N", min=2, help="Measurements of each choice.")
    ] = 3,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Seed of the random prompts.", show_default="random"),
    ] = None,
    offline: options.Offline = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure without writing the configuration.")
    ] = False,
    as_json: options.AsJson = False,
) -> Result | None:
    """Find the fastest back ends and CUDA-graph sizes.

    The best choices are written to the model's configuration. A choice is kept if it is faster by
    more than the noise of the measurements and its logits differ by rounding alone.
    """
    seed = fresh_seed() if seed is None else seed
    _say(f"seed {seed}")
    overrides = {"device": device.value, "dtype": dtype.value}
    folder = root.expanduser()
    path = None if dry_run else _target(model, folder, config)
    tuning, hardware = _tune(
        model, folder, config, overrides, random_weights, (batch, context, repeats, seed)
    )
    if path is not None:
        from onboard.bench.tuning.tuned_config import write

        write(path, tuning, hardware, datetime.now(UTC).strftime("%Y-%m-%d"))
    if as_json:
        return Result({"device": hardware, "seed": seed, **asdict(tuning)})
    _show(tuning, path)
    return None


def _target(model: str, root: Path, config: Path | None) -> Path:
    from onboard.bench.tuning.tuned_config import config_file

    return config_file(model, root, config)


def _tune(
    model: str,
    root: Path,
    config: Path | None,
    overrides: dict[str, Any],
    random_weights: bool,
    sizes: tuple[str | None, str | None, int, int],
) -> tuple[Tuning, str]:
    from onboard.bench.ceilings import device_name
    from onboard.bench.shape import grid
    from onboard.bench.subject import open_subject
    from onboard.bench.tuning.tune import tune
    from onboard.runtime.build import resolve_device

    batch, context, repeats, seed = sizes
    given = config if config is not None and config.is_file() else None
    with open_subject(
        model, root, config=given, overrides=overrides, random_weights=random_weights
    ) as subject:
        device = resolve_device(subject.runtime.device)
        batches = numbers("batch", batch or f"1,{subject.runtime.max_batch_size or 8}")
        output = _OUTPUT[device.type]
        contexts = numbers("context", context or str(_usual_context(subject.positions, output)))
        shapes = grid(batches, contexts, output)
        found = tune(subject, shapes, seed=seed, repeats=repeats, on_progress=_say)
    return found, device_name(device)


_OUTPUT = {"cuda": 64, "cpu": 24}
"""Tokens to generate for a prompt."""
_CONTEXT = 128


def _usual_context(positions: int | None, output: int) -> int:
    """Return a prompt's length that leaves room for the output in the longest sequence."""
    return _CONTEXT if positions is None else max(min(_CONTEXT, positions - output), 1)


def _show(tuning: Tuning, path: Path | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    table = Table(box=SIMPLE_HEAD)
    for name in ("setting", "value", *tuning.trials[0].milliseconds, "error", "ratio", ""):
        table.add_column(name, justify="left" if name in ("setting", "value", "") else "right")
    for trial in tuning.trials:
        table.add_row(
            trial.knob, str(trial.value), *_figures(trial, len(tuning.trials[0].milliseconds))
        )
    console.print(table)
    if tuning.buckets:
        kept = tuning.changes["cuda_graph_config"]["batch_sizes"]
        steps = (
            f"{size}: {ms:.3f}{'*' * (size in kept)}" for size, ms in sorted(tuning.buckets.items())
        )
        console.print(f"decode step in ms by batch size, * captured: {', '.join(steps)}")
    for fact in tuning.facts:
        console.print(Text(f"note: {one_line(fact)}", style="dim"))
    print(f"wrote {path}" if path is not None else "wrote nothing")


def _figures(trial: Trial, count: int) -> list[str]:
    if not trial.milliseconds:
        return [*[""] * count, "", "", trial.reason]
    times = [f"{ms:.3f}" for ms in trial.milliseconds.values()]
    return [
        *times,
        f"{trial.error:.1e}",
        f"{trial.score:.3f}",
        "kept" if trial.kept else trial.reason,
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

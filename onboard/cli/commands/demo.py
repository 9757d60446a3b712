"""`onboard demo`: onboard the embedded checkpoint and show what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onboard.cli.commands.model import ModelRun
from onboard.cli.options import AsJson, Device, DTypeName, InDType, OnDevice
from onboard.cli.result import Result

CHECKPOINT = Path(__file__).resolve().parents[2] / "assets" / "demo"
"""A small Llama, trained by `scripts/demo/train.py`."""


def demo(
    root: Annotated[
        Path, typer.Option(help="Root folder: all files are written under it.", file_okay=False)
    ] = Path("workspace"),
    device: OnDevice = Device.AUTO,
    dtype: InDType = DTypeName.AUTO,
    fresh: Annotated[bool, typer.Option("--fresh", help="Rerun every phase.")] = False,
    as_json: AsJson = False,
) -> Result | int:
    """Onboard the embedded demo checkpoint, a small story writer."""
    from onboard.workflow.phase import RunOptions

    run = ModelRun(str(CHECKPOINT), root, RunOptions(device=device.value, dtype=dtype.value))
    error = run.execute(until=None, from_=None, fresh=fresh)
    if as_json:
        return Result(run.fields(), error)
    run.print_text(error)
    if error is not None:
        raise error
    return 0

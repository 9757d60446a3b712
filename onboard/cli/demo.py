"""`onboard demo`: onboard the embedded checkpoint and show what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from onboard.cli.model import Device, DTypeName, ModelRun

CHECKPOINT = Path(__file__).resolve().parents[1] / "assets" / "demo"
"""A small Llama, trained by `scripts/demo/train.py`."""


def demo(
    root: Annotated[Path, typer.Option(help="Folder that everything is written to.")] = Path("workspace"),
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.AUTO,
    dtype: Annotated[DTypeName, typer.Option(help="What the model computes in.")] = DTypeName.AUTO,
    fresh: Annotated[bool, typer.Option("--fresh", help="Rerun every phase.")] = False,
) -> int:
    """Onboard the embedded demo checkpoint: a story writer of four million parameters."""
    from onboard.workflow.phase import RunOptions

    run = ModelRun(str(CHECKPOINT), root, RunOptions(device=device.value, dtype=dtype.value))
    error = run.execute(until=None, from_=None, fresh=fresh)
    if error is not None:
        run.print_text(error)
        raise error
    assert run.outcome is not None
    artifacts = run.outcome.document()["artifacts"]
    _print_texts(Path(artifacts["run"]))
    run.print_text(None)
    print(f"\nreport: {artifacts['report_html']}")
    return 0


def _print_texts(run_file: Path) -> None:
    """Print the prompts and what the model made of them."""
    for record in json.loads(run_file.read_text(encoding="utf-8"))["runs"]["full"]["prompts"]:
        print(f"> {record['prompt']}\n{record['prompt']}{record['output']}\n")

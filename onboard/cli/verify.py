"""`onboard verify`: is the graph still the model after every transform?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.names import check_config, registered_names
from onboard.cli.options import CompileBackendName, Device, DTypeName, ModeName
from onboard.hub import go_offline

if TYPE_CHECKING:
    from onboard.runtime.verify import Check, VerifyReport


def verify(
    model: options.Model,
    root: options.Root = Path(),
    config: options.Config = None,
    device: options.OnDevice = Device.AUTO,
    dtype: options.InDType = DTypeName.AUTO,
    compile_backend: options.CompileBackend = CompileBackendName.AUTO,
    mode: options.Mode = ModeName.GRAPH,
    seed: Annotated[int | None, typer.Option(help="Of the prompts.", show_default="random")] = None,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> int:
    """Compare with transformers after every transform.

    Prefill, chunked prefill, cached and batched decode, eager and compiled; exit code 1 when they differ.
    """
    if offline:
        go_offline()
    overrides = {
        "device": device.value,
        "dtype": dtype.value,
        "compile_backend": compile_backend.value,
        "mode": mode.value,
    }
    with registered_names(model, root):
        check_config(model, root, config, overrides)
        report = _verify(model, root=root, config=config, seed=seed, **overrides)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _print_report(report)
    return 0 if report.passed else 1


def _verify(model: str, **settings: Any) -> VerifyReport:
    from onboard.runtime.verify import verify_model

    return verify_model(
        model, on_check=lambda check: print(f"checked {check.transform}", file=sys.stderr, flush=True), **settings
    )


def _print_report(report: VerifyReport) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    ways = list(dict.fromkeys(way for check in report.checks for way in check.errors))
    table = Table(
        Column("after", no_wrap=True), *ways, "", title=f"rmse / rmse of the logits, at most {report.tolerance:.1e}"
    )
    for check in report.checks:
        verdict = "ok" if check.passes(report.tolerance) else check.exception or "differs"
        table.add_row(check.transform, *(_cell(check, way) for way in ways), verdict)
    console = Console(highlight=False)
    console.print(table, markup=False)
    lengths = ", ".join(map(str, report.prompt_lengths))
    print(f"{report.device}, {report.dtype}, prompts of {lengths} tokens, seed {report.seed}")
    if report.reference_error:
        print(f"transformers itself in {report.dtype} against float32: {report.reference_error:.1e}")
    if report.graph_replays:
        print(f"CUDA graphs replayed: {report.graph_replays}")
    for fact in report.facts:
        print(f"note: {fact}")
    failure = report.first_failure
    print(f"FAILED: the logits leave their tolerance after {failure.transform}" if failure else "passed")


def _cell(check: Check, way: str) -> str:
    return f"{check.errors[way]:.1e}" if way in check.errors else ""

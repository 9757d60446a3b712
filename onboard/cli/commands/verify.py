"""`onboard verify`: is the graph still the model after every transform?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.model_argument import check_config, registered_names, say_division
from onboard.cli.options import CompileBackendName, Device, DTypeName, ModeName
from onboard.cli.prompting.media_options import Unsandboxed
from onboard.cli.result import Result
from onboard.cli.setting_options import settings_of
from onboard.cli.terminal import one_line
from onboard.errors import OnboardError
from onboard.untrusted.consent import Consent

if TYPE_CHECKING:
    from onboard.verify.transforms.stage_limits import Limit
    from onboard.verify.transforms.stages import VerifyReport

_TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Compare a model that has code of its own with that, in a sandbox.",
    ),
]


def verify(
    model: options.Model,
    root: options.Root = Path(),
    config: options.Config = None,
    device: options.OnDevice = Device.AUTO,
    dtype: options.InDType = DTypeName.AUTO,
    compile_backend: options.CompileBackend = CompileBackendName.AUTO,
    mode: options.Mode = ModeName.GRAPH,
    revision: options.Revision = None,
    world_size: options.WorldSize = None,
    set_: options.Set = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random prompts.", show_default="random")
    ] = None,
    trust_remote_code: _TrustRemoteCode = False,
    unsandboxed: Unsandboxed = False,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> Result | int:
    """Compare with transformers after every transform.

    Compares the logits of prefill, chunked prefill, and cached and batched decode, eager and
    compiled; where a model has code of its own, with that code. Exit code 1 if they differ.
    """
    settings = settings_of(set_, revision=revision, world_size=world_size)
    overrides = {
        "device": device.value,
        "dtype": dtype.value,
        "compile_backend": compile_backend.value,
        "mode": mode.value,
    }
    with registered_names(model, root):
        runtime = check_config(model, root, config, overrides, settings)
        say_division(runtime, model, root, {**overrides, **settings})
        report = _verify(
            model,
            None if as_json else print_row,
            root=root,
            config=config,
            seed=seed,
            settings=settings,
            consent=Consent(trust_remote_code, unsandboxed),
            **overrides,
        )
    if as_json:
        return Result(report.as_dict(), _failure(report))
    print_end(report)
    return 0 if report.passed else 1


def _failure(report: VerifyReport) -> OnboardError | None:
    failure = report.first_failure
    return (
        OnboardError(f"the logits leave their tolerance after {failure.transform}")
        if failure
        else None
    )


def _verify(
    model: str,
    on_check: Callable[[VerifyReport], None] | None,
    consent: Consent,
    **settings: Any,
) -> VerifyReport:
    from onboard.verify.transforms.stages import verify_model
    from onboard.workflow.remote.own_reference import references_by

    return verify_model(model, on_check=on_check, references=references_by(consent), **settings)


_WAYS = {
    "prefill": "prefill",
    "chunked prefill": "chunked",
    "decode": "decode",
    "batched decode": "batched",
}
"""The ways of running and what their columns are called."""
_NAME = 40
"""Columns of a transform's name; with four numbers and a verdict 80."""


def print_row(report: VerifyReport) -> None:
    """Print what came of the transform that was checked last; one that matched nothing only when it
    is wrong.
    """
    check, before = report.checks[-1], report.checks[-2:-1]
    if not before:
        print(f"rmse / rmse of the logits, {_at_most(report.limit)}")
        print(_row("after", list(_WAYS.values()), ""))
    elif before[0].limit != report.limit:
        print(f"  {_at_most(report.limit)} from here on: inputs are in eight bits")
    if check.matched or not check.passes:
        cells = [f"{check.errors[way]:.1e}" if way in check.errors else "" for way in _WAYS]
        print(_row(check.transform, cells, "ok" if check.passes else "wrong"), flush=True)
        if check.exception:
            print(f"  {check.exception}")


def _at_most(limit: Limit) -> str:
    usual = "" if limit.usual is None else f", in the median row {limit.usual:.1e}"
    return f"at most {limit.error:.1e}{usual}"


def _row(name: str, cells: list[str], verdict: str) -> str:
    return f"{name:<{_NAME}}{''.join(f'{cell:>8}' for cell in cells)}  {verdict}".rstrip()


def print_end(report: VerifyReport) -> None:
    """Print what is said once: transforms that are left out above, how it was measured, facts, the
    verdict.
    """
    if idle := sum(not check.matched and check.passes for check in report.checks):
        print(f"{idle} more transforms matched nothing in this model: ok")
    lengths = ", ".join(map(str, report.prompt_lengths))
    print(f"compared with {report.beside}")
    print(f"{report.device}, {report.dtype}, prompts of {lengths} tokens, seed {report.seed}")
    if own := report.limit.reference_error:
        print(f"{report.beside} in {report.dtype} against itself in float32: {own:.1e}")
    if report.graph_replays:
        print(f"CUDA graphs replayed: {report.graph_replays}")
    for fact in report.facts:
        print(f"note: {one_line(fact)}")
    failure = report.first_failure
    print(
        f"FAILED: the logits leave their tolerance after {failure.transform}"
        if failure
        else "passed"
    )

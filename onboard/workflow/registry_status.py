"""What the registry says of a model's run: pending while it goes on, then passed or failed, and
since when.

An entry is written before the run, which reads its config. So that it never stands for a model that
nobody saw work, it says so itself, and what serves a model says it too
(`onboard.runtime.tested_file`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any

from onboard import registry
from onboard.content import content_path
from onboard.gpu import list_gpus
from onboard.registry_text import set_fields
from onboard.workflow.files import write_atomically
from onboard.workflow.phase import PhaseResult, RunContext
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.registry_results import Result, now, save_result
from onboard.workflow.reporting.support_matrix import empty_matrix, matrix_path, updated_matrix

PhaseRun = Callable[[Any, RunContext], PhaseResult]


def recorded(run: PhaseRun) -> PhaseRun:
    """Have the outcome of a phase's run written to the model's registry entry; a killed one leaves
    it pending.
    """

    @wraps(run)
    def recording(phase: Any, context: RunContext) -> PhaseResult:
        if context.options.dry_run:
            return run(phase, context)
        _record(context, "pending")
        try:
            result = run(phase, context)
        except Exception:
            _record(context, "failed")
            raise
        _record(context, "passed")
        return result

    return recording


def _record(context: RunContext, status: registry.Status) -> None:
    """Write a status under the registry's lock, a failure to the support matrix, too; a removed
    entry stays removed.
    """
    path, name = registry.models_path(context.root), context.read_json(REGISTRATION)["name"]
    with registry.registry_lock(context.root):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if not any(entry.name == name for entry in registry.parse_entries(text)):
            return
        today = datetime.now(UTC).date().isoformat()
        ended = {} if status == "pending" else {"tested": today, "model_file": _model_file(context)}
        new = set_fields(text, name, {"status": status, **ended})
        write_atomically(path, new, staging=context.files.staging)
        if status == "failed":
            _show_failure(context)


def _show_failure(context: RunContext) -> None:
    """Write a failed run to results and support matrix, which the phase for it is not reached to
    do.
    """
    path, name = matrix_path(context.root), context.read_json(REGISTRATION)["name"]
    text = path.read_text(encoding="utf-8") if path.exists() else empty_matrix()
    device = (
        context.options.device
        if context.options.device != "auto"
        else "cuda"
        if list_gpus()
        else "cpu"
    )
    results = save_result(
        context.root, Result(name=name, status="failed", date=now(), device=device)
    )
    write_atomically(path, updated_matrix(text, context, results), staging=context.files.staging)


def _model_file(context: RunContext) -> str:
    path = content_path("models", f"modeling_{context.spec.family}.py", root=context.root)
    return registry.digest(path)

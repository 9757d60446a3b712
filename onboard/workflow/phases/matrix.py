"""matrix: add the model to the support matrix, with no more than a run has shown."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

from onboard import registry
from onboard.content import content_path
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.phases.run import ARTIFACT as RUN
from onboard.workflow.registry_results import (
    Result,
    load_results,
    result_of,
    results_path,
    text_of,
    with_result,
    with_tests,
)
from onboard.workflow.reporting.support_matrix import (
    empty_matrix,
    feature_row,
    matrix_path,
    model_row,
    updated_matrix,
    window,
)


class Matrix(Phase):
    """Adds or updates the model's rows in `registry/supported_models.md`."""

    name = "matrix"
    merged: ClassVar[frozenset[str]] = frozenset({"matrix"})

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on what the rows say."""
        registration, rows = context.read_json(REGISTRATION), [own_result(context)]
        return {
            "rows": [
                model_row(context.spec, registration, rows),
                feature_row(context.spec, registration, rows),
            ]
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Update the matrix under the registry's lock."""
        path = matrix_path(context.root)
        with nullcontext() if context.options.dry_run else registry.registry_lock(context.root):
            text = path.read_text(encoding="utf-8") if path.exists() else empty_matrix()
            results = with_result(load_results(context.root), own_result(context))
            text = updated_matrix(text, context, results)
            context.files.write(results_path(context.root), text_of(results))
            context.files.write(path, text)
        return PhaseResult(
            artifacts={"matrix": context.relative(path)}, summary=f"row in {context.relative(path)}"
        )


def own_result(context: RunContext) -> Result:
    """Return the row of a run's model."""
    run, registration = context.read_json(RUN), context.read_json(REGISTRATION)
    fields = {"command": run["command"], "log": run.get("log", "")}
    fields |= {"date": run["date"]} if "date" in run else {}
    row = result_of(registration["name"], run["runs"]["full"], window(context.spec), **fields)
    file = content_path("models", f"modeling_{context.spec.family}.py", root=context.root)
    return with_tests(row, file, context.root)

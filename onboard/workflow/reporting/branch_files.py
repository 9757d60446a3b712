"""The files of a model's branch."""

from __future__ import annotations

from typing import Any

from onboard.workflow.phase import RunContext
from onboard.workflow.phases.cookbook import notebook_path
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.phases.test import model_path, test_path

MODELS, MATRIX = "registry/models.yaml", "registry/supported_models.md"


def own_files(context: RunContext) -> list[str]:
    """Return the files under the root that are this model's (and its family's) alone."""
    registration = context.read_json(REGISTRATION)
    paths = [
        model_path(context).as_posix(),
        test_path(context).as_posix(),
        registration["config"],
        context.relative(notebook_path(context)),
        *(member["config"] for member in registration.get("members", [])),
    ]
    return [path for path in paths if context.files.exists(context.root / path)]


def listed_files(context: RunContext, registration: dict[str, Any]) -> list[tuple[str, str]]:
    """Return all files of the branch, each with the part of it that is the model's; "" for all."""
    members = len(registration.get("members", []))
    others = f", and {members} of its family that nobody has tried" if members else ""
    return [
        *((path, "") for path in own_files(context)),
        (MODELS, f"one entry{others}"),
        (MATRIX, "one row a table"),
    ]

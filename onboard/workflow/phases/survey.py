"""survey: what is there already for this model's family, and what is left to cover it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from onboard.content import CONTENT_ROOT
from onboard.workflow.checkpoint.family import (
    Kind,
    configs_here,
    differences,
    family_name,
    on_the_hub,
    registered,
)
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.gather import ARTIFACT as GATHER

ARTIFACT = "survey.json"


class Survey(Phase):
    """The family's model file, its registry entries, its other sizes, and a plan that covers them
    together.
    """

    name = "survey"
    judges_input: ClassVar[bool] = True

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on the model alone: what later phases add to the root must not make this one run
        again.
        """
        return {key: context.read_json(GATHER)[key] for key in ("model", "model_type")}

    def run(self, context: RunContext) -> PhaseResult:
        """Look at the root, at the shipped content and, for an id, at the Hub."""
        family = family_name(context.read_json(GATHER)["model_type"])
        config = context.source.config()
        kind = Kind.of_config(config)
        members, note = on_the_hub(context.source, kind)
        known = registered(kind, context.root, context.model)
        missing = [member for member in members if member["name"] not in known]
        relatives = configs_here(known, context.root) | {
            member["name"]: member["config"] for member in members
        }
        facts: dict[str, Any] = {
            "family": family,
            "model_file": _found(context, family),
            "architecture": kind.architecture,
            "registered": known,
            "siblings": [member["name"] for member in members],
            "missing": [member["name"] for member in missing],
            "differences": {name: differences(config, other) for name, other in relatives.items()},
            "configs": {member["name"]: member["config"] for member in missing},
            "note": note,
        }
        facts["plan"] = plan(facts)
        path = context.write_json(ARTIFACT, facts)
        return PhaseResult({"survey": context.relative(path)}, facts["plan"])


def _found(context: RunContext, family: str) -> dict[str, Any] | None:
    """Return where the model file is, and whether it is a user's."""
    found = existing_model_file(context.root, family)
    return found and {**found, "users": context.files.is_users(context.root / found["path"])}


def existing_model_file(root: Path, family: str) -> dict[str, str] | None:
    """Return where the family's model file is: under the root, or shipped with the tool."""
    relative = f"models/modeling_{family}.py"
    for place, folder in (("root", root), ("shipped", CONTENT_ROOT)):
        if (folder / relative).is_file():
            return {"path": relative, "where": place}
    return None


def plan(facts: dict[str, Any]) -> str:
    """Return what is going to be done, in one line."""
    target = f"models/modeling_{facts['family']}.py"
    found = facts["model_file"]
    action = f"check {target} against it ({found['where']})" if found else f"write {target}"
    if found and found["users"]:
        action += "; no run here wrote it as it is, so it is kept where it differs"
    members = (
        f"; {len(facts['missing'])} more sizes of the family are registered, untested"
        if facts["missing"]
        else ""
    )
    return f"{action}{members}"

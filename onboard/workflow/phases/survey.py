"""survey: what is there already for this model's family, and what is left to cover it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from onboard import registry
from onboard.content import CONTENT_ROOT
from onboard.hub import HubSource
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.gather import ARTIFACT as GATHER

ARTIFACT = "survey.json"
_SIZE = re.compile(r"[-_.]?\d+(\.\d+)?[bm]\b.*", re.IGNORECASE)
_MOST_SIBLINGS = 50


class Survey(Phase):
    """The family's model file, its registry entries, its other sizes, and a plan that covers them together."""

    name = "survey"
    judges_input: ClassVar[bool] = True

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on the model alone: what later phases add to the root must not make this one run again."""
        return {key: context.read_json(GATHER)[key] for key in ("model", "model_type")}

    def run(self, context: RunContext) -> PhaseResult:
        """Look at the root, at the shipped content and, for an id, at the Hub."""
        family = family_name(context.read_json(GATHER)["model_type"])
        siblings, note = hub_siblings(context.source)
        registered = registered_members(context.root, context.model)
        facts: dict[str, Any] = {
            "family": family,
            "model_file": _found(context, family),
            "registered": registered,
            "siblings": siblings,
            "missing": [name for name in siblings if name not in registered],
            "note": note,
        }
        facts["plan"] = plan(facts)
        path = context.write_json(ARTIFACT, facts)
        return PhaseResult({"survey": context.relative(path)}, facts["plan"])


def family_name(model_type: str) -> str:
    """Return the model type as the identifier that names the family's files."""
    return re.sub(r"\W", "_", model_type).lower()


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


def registered_members(root: Path, model: str) -> list[str]:
    """Return the other registry entries whose names differ from the model's in size and variant only."""
    own = registry.find_entry(model, root)
    names = {entry.name for entry in registry.load_entries(root) if own is None or entry.name != own.name}
    return sorted(name for name in names if stem(name) == stem(model))


def stem(model: str) -> str:
    """Return a model's name without owner, size and what follows it: "Qwen3" for "Qwen/Qwen3-0.6B-Base"."""
    return _SIZE.sub("", model.rstrip("/").rsplit("/", 1)[-1]).lower()


def hub_siblings(source: Any) -> tuple[list[str], str]:
    """Return the owner's other models of the same stem and, when they could not be listed, why."""
    if not isinstance(source, HubSource) or "/" not in source.model:
        return [], "a local folder has no listed relatives"
    if source.offline:
        return [], "offline: the Hub was not asked for relatives"
    from huggingface_hub import list_models
    from huggingface_hub.errors import HTTPError

    owner, own_stem = source.model.split("/", 1)[0], stem(source.model)
    try:
        found = [info.id for info in list_models(author=owner, search=own_stem, limit=_MOST_SIBLINGS)]
    except (OSError, ValueError, HTTPError) as error:
        return [], f"the Hub could not list relatives ({str(error).splitlines()[0]})"
    return sorted(name for name in found if name != source.model and stem(name) == own_stem), ""


def plan(facts: dict[str, Any]) -> str:
    """Return what is going to be done, in one line."""
    target = f"models/modeling_{facts['family']}.py"
    found = facts["model_file"]
    action = f"check {target} against it ({found['where']})" if found else f"write {target}"
    if found and found["users"]:
        action += "; no run here wrote it as it is, so it is kept where it differs"
    members = f"; {len(facts['missing'])} more sizes of the family could follow" if facts["missing"] else ""
    return f"{action}{members}"

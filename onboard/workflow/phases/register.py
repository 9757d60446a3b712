"""register: give the model an entry in the registry and a standalone config that a run needs
nothing else than.

A new entry is pending until the model's run has ended (`onboard.workflow.registry_status`). The sizes of
the family that survey found get entries, too, which say that nobody tried them; entries that do not
fit are mended, and that is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

from onboard import registry
from onboard.analysis.spec import ModelSpec
from onboard.composition import compose, compose_config
from onboard.config import RuntimeConfig, deep_merge
from onboard.errors import OnboardError
from onboard.registry import RegistryEntry
from onboard.registry_text import insert_entry, set_fields, set_files
from onboard.workflow.checkpoint.checkpoint_size import max_positions
from onboard.workflow.checkpoint.family import Kind, family_name, registered
from onboard.workflow.checkpoint.fewest_gpus import (
    FewestGpus,
    config_folder,
    fewest_gpus,
    parameters_of,
)
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.survey import ARTIFACT as SURVEY

ARTIFACT = "registration.json"
SHARED = re.compile(r"dashboard_default\.yaml|world_size_(\d+)\.yaml")


class Register(Phase):
    """Adds the model to `registry/models.yaml` and writes `registry/configs/<slug>.yaml`."""

    name = "register"
    editable: ClassVar[frozenset[str]] = frozenset({"config"})
    merged: ClassVar[frozenset[str]] = frozenset({"registry"})

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on what the config is made from."""
        spec = context.spec
        return {
            "model": registry.identity(context.model),
            "architecture": spec.architecture,
            "parameters": spec.num_parameters,
            "config": spec.config,
            "dtype": context.options.dtype,
            "revision": spec.revision,
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Register under the lock, so that runs for other models lose nothing."""
        spec = context.spec
        with nullcontext() if context.options.dry_run else registry.registry_lock(context.root):
            name, config_id = registry.claim_names(context.model, context.root)
            dtype, ranks = context.options.dtype, _gpus(context)
            text = standalone_text(context.model, dtype, spec, context.root, ranks.count)
            record: dict[str, Any] = {
                "name": name,
                "config_id": config_id,
                "architecture": spec.architecture,
                "world_size": ranks.count,
                "world_size_reason": ranks.why,
            }
            record |= _write_config(context, config_id, text)
            entry = new_entry(spec, name, config_id, ranks.count)
            record |= write_entry(context, entry.model_copy(update={"status": "pending"}))
            record["members"] = register_members(context)
            record["mended"] = mend_relatives(context, record)
        record["family"] = family_members(context, record)
        path = context.write_json(ARTIFACT, record)
        return PhaseResult(
            artifacts={
                "registry": "registry/models.yaml",
                "config": record["config"],
                "registration": context.relative(path),
            },
            summary=_summary(record),
        )


def composition_of(world_size: int) -> list[str]:
    """Return the shared configs that a model's own is made from."""
    return ["dashboard_default.yaml", f"world_size_{world_size}.yaml"]


def _gpus(context: RunContext) -> FewestGpus:
    """Return how many GPUs the model of this run is registered with."""
    spec, options = context.spec, context.options
    return fewest_gpus(
        context.source.files(),
        spec.config,
        spec.num_parameters,
        dtype=options.dtype,
        root=context.root,
        model=context.model,
    )


def gpus_of_config(config: Mapping[str, Any], root: Path, model: str) -> FewestGpus:
    """Return the same for a model of which the config alone is here."""
    try:
        parameters = parameters_of(config)
    except OnboardError as error:
        return FewestGpus(1, f"how large it is is not known: {error.message}")
    with config_folder(config) as folder:
        return fewest_gpus(folder, config, parameters, root=root, model=model)


def new_entry(spec: ModelSpec, name: str, config_id: str, world_size: int) -> RegistryEntry:
    """Return the entry of a model that nobody has tried."""
    from onboard.quantised.read_method import describe_unread

    kind, unread = Kind.of_config(spec.config), describe_unread(spec.config)
    return RegistryEntry(
        name=name,
        config_id=config_id,
        yaml_extra=[*composition_of(world_size), f"{config_id}.yaml"],
        architecture=kind.architecture or spec.architecture,
        family=family_name(spec.family),
        note=unread and f"released quantised ({unread}), which cannot be loaded yet",
    )


def standalone_text(model: str, dtype: str, spec: ModelSpec, root: Path, world_size: int) -> str:
    """Return the model's self-contained config: the composition and what is the model's own,
    validated.
    """
    base = compose_config(composition_of(world_size), root).model_dump(
        mode="json", exclude_unset=True
    )
    positions = max_positions(spec.config | (spec.repository.native if spec.repository else {}))
    longest = base.get("max_seq_len")
    own = {
        "dtype": dtype,
        "max_seq_len": min(longest, positions) if longest and positions else longest,
    }
    first: dict[str, Any] = {"model": registry.identity(model)}
    if spec.revision:
        first["revision"] = spec.revision
    config = deep_merge(deep_merge(first, base), own) | {"model_kwargs": {}, "transforms": {}}
    RuntimeConfig.model_validate(config)
    return registry.dump_config(
        config, "Self-contained: all that a run of this model needs besides its checkpoint."
    )


def family_members(context: RunContext, record: dict[str, Any]) -> list[str]:
    """Return the names of the other models registered under this root that have the same
    architecture.

    They share the generated model file; each one's configs are composed, so that a broken one is
    seen now.
    """
    entries = {entry.name: entry for entry in registry.load_entries(context.root)}
    members = []
    for path in sorted(context.work_dir.parent.glob(f"*/{ARTIFACT}")):
        other = json.loads(path.read_text(encoding="utf-8"))
        entry = entries.get(other["name"])
        if (
            entry
            and other["name"] != record["name"]
            and other["architecture"] == record["architecture"]
        ):
            compose(entry, context.root)
            members.append(other["name"])
    return members


def _write_config(context: RunContext, config_id: str, text: str) -> dict[str, Any]:
    """Write the standalone config, unless it is a user's or came with the root: that is kept, if it
    is valid.
    """
    path = registry.config_path(context.root, config_id)
    written = context.files.put(path, text)
    if not written:
        registry.load_standalone(path)
    return {
        "config": context.relative(path),
        "config_status": "written" if written else "kept as it was",
    }


def write_entry(context: RunContext, entry: RegistryEntry) -> dict[str, Any]:
    """Add an entry, or mend the one that there is; return it and what was done."""
    path = registry.models_path(context.root)
    old = context.files.read(path) if context.files.exists(path) else registry.HEADER
    new, status = insert_entry(old, entry), "added"
    if new == old:
        new, changes = mended(old, entry)
        status = f"updated: {', '.join(changes)}" if changes else "already there"
    context.files.write(path, new)
    found = next(known for known in registry.parse_entries(new) if known.name == entry.name)
    return {"entry": found.model_dump(mode="json"), "entry_status": status}


def mended(text: str, entry: RegistryEntry) -> tuple[str, list[str]]:
    """Return a `models.yaml` in which the entry of this name has what it must have, and what
    changed for that.

    That is the shared configs of `entry` and its standalone config; fragments stay where they are.
    """
    known = next(each for each in registry.parse_entries(text) if each.name == entry.name)
    kept = [file for file in known.yaml_extra if not SHARED.fullmatch(file)]
    files = [
        *composition_of(_world_size(entry)),
        *kept,
        *([known.standalone] if known.standalone not in kept else []),
    ]
    changes = []
    if files != known.yaml_extra:
        changes.append(f"configs {' '.join(known.yaml_extra) or 'none'} -> {' '.join(files)}")
        text = set_files(text, entry.name, files)
    for field in ("architecture", "family", "note"):
        old, new = getattr(known, field), getattr(entry, field)
        if new and old != new:
            changes += [f"{field} {old} -> {new}"] if old else []
            text = set_fields(
                text, entry.name, {field: json.dumps(new) if field == "note" else new}
            )
    return text, changes


def _world_size(entry: RegistryEntry) -> int:
    """Return the world size that an entry's files name; one where they name none."""
    found = (match for file in entry.yaml_extra if (match := SHARED.fullmatch(file)) is not None)
    return next((int(match[1]) for match in found if match[1]), 1)


def register_members(context: RunContext) -> list[dict[str, Any]]:
    """Register the sizes of the family that survey found and that are not registered yet; call it
    under the lock.
    """
    found = (
        context.read_json(SURVEY).get("configs", {})
        if context.files.exists(context.artifact(SURVEY))
        else {}
    )
    return [_register_member(context, name, config) for name, config in found.items()]


def _register_member(context: RunContext, model: str, config: dict[str, Any]) -> dict[str, Any]:
    name, config_id = registry.claim_names(model, context.root)
    spec = context.spec.model_copy(update={"config": config, "revision": None, "repository": None})
    ranks = gpus_of_config(config, context.root, model)
    text = standalone_text(model, "auto", spec, context.root, ranks.count)
    record: dict[str, Any] = {"name": name, "config_id": config_id, "world_size": ranks.count}
    record |= {"world_size_reason": ranks.why} | _write_config(context, config_id, text)
    return record | write_entry(context, new_entry(spec, name, config_id, ranks.count))


def mend_relatives(context: RunContext, record: dict[str, Any]) -> dict[str, str]:
    """Mend the family's other entries; return what was done to which. Call it under the lock."""
    own = record["entry"]
    kind = Kind(own["architecture"], own["family"])
    done = {}
    for name in registered(kind, context.root, record["name"]):
        entry = next(entry for entry in registry.load_entries(context.root) if entry.name == name)
        status = write_entry(context, entry)["entry_status"]
        if status != "already there":
            done[name] = status
    return done


def _summary(record: dict[str, Any]) -> str:
    said = f"{record['name']}: entry {record['entry_status']}, {record['config']} {record['config_status']}"
    members = [member["name"] for member in record["members"]]
    said += f"; world size {record['world_size']}: {record['world_size_reason']}"
    said += f"; of its family, untested: {', '.join(members)}" if members else ""
    return said + "".join(f"; {name} {what}" for name, what in record["mended"].items())

"""register: give the model an entry in the registry and a standalone config that a run needs nothing else than.

A new entry is pending until the model's run has ended (`onboard.workflow.verdict`).
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

from onboard import registry
from onboard.analysis.spec import ModelSpec
from onboard.config import RuntimeConfig, deep_merge
from onboard.registry import RegistryEntry
from onboard.workflow.checkpoint import max_positions
from onboard.workflow.phase import Phase, PhaseResult, RunContext

ARTIFACT = "registration.json"


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
            composition = composition_of(spec)
            text = standalone_text(context.model, context.options.dtype, spec, context.root)
            record: dict[str, Any] = {"name": name, "config_id": config_id, "architecture": spec.architecture}
            record |= _write_config(context, config_id, text)
            files = [*composition, f"{config_id}.yaml"]
            entry = RegistryEntry(name=name, config_id=config_id, yaml_extra=files, status="pending")
            record |= _write_entry(context, entry)
        record["family"] = family_members(context, record)
        path = context.write_json(ARTIFACT, record)
        return PhaseResult(
            artifacts={
                "registry": "registry/models.yaml",
                "config": record["config"],
                "registration": context.relative(path),
            },
            summary=f"{name}: entry {record['entry_status']}, {record['config']} {record['config_status']}",
        )


def composition_of(spec: ModelSpec) -> list[str]:
    """Return the shared configs that a model's own is made from."""
    return ["dashboard_default.yaml", f"world_size_{registry.world_size_for(spec.num_parameters)}.yaml"]


def standalone_text(model: str, dtype: str, spec: ModelSpec, root: Path) -> str:
    """Return the model's self-contained config: the composition and what is the model's own, validated."""
    base = registry.compose_config(composition_of(spec), root).model_dump(mode="json", exclude_unset=True)
    positions = max_positions(spec.config | (spec.repository.native if spec.repository else {}))
    own = {
        "dtype": dtype,
        "max_seq_len": min(base["max_seq_len"], positions) if positions else base["max_seq_len"],
    }
    first: dict[str, Any] = {"model": registry.identity(model)}
    if spec.revision:
        first["revision"] = spec.revision
    config = deep_merge(deep_merge(first, base), own) | {"model_kwargs": {}, "transforms": {}}
    RuntimeConfig.model_validate(config)
    return registry.dump_config(config, "Self-contained: all that a run of this model needs besides its checkpoint.")


def family_members(context: RunContext, record: dict[str, Any]) -> list[str]:
    """Return the names of the other models registered under this root that have the same architecture.

    They share the generated model file; each one's configs are composed, so that a broken one is seen now.
    """
    entries = {entry.name: entry for entry in registry.load_entries(context.root)}
    members = []
    for path in sorted(context.work_dir.parent.glob(f"*/{ARTIFACT}")):
        other = json.loads(path.read_text(encoding="utf-8"))
        entry = entries.get(other["name"])
        if entry and other["name"] != record["name"] and other["architecture"] == record["architecture"]:
            registry.compose_config(entry.yaml_extra, context.root)
            members.append(other["name"])
    return members


def _write_config(context: RunContext, config_id: str, text: str) -> dict[str, Any]:
    """Write the standalone config, unless it is a user's or came with the root: that is kept, if it is valid."""
    path = registry.config_path(context.root, config_id)
    written = context.files.put(path, text)
    if not written:
        registry.load_standalone(path)
    return {"config": context.relative(path), "config_status": "written" if written else "kept as it was"}


def _write_entry(context: RunContext, entry: RegistryEntry) -> dict[str, Any]:
    path = registry.models_path(context.root)
    old = path.read_text(encoding="utf-8") if path.exists() else registry.HEADER
    new = registry.insert_entry(old, entry)
    context.files.write(path, new)
    registered = next(e for e in registry.parse_entries(new) if e.name == entry.name)
    return {"entry": registered.model_dump(mode="json"), "entry_status": "added" if new != old else "already there"}

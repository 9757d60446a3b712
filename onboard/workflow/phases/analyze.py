"""analyze: find out what the architecture is made of, with the evidence for each finding."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from onboard.analysis.spec import ModelSpec
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.gather import ARTIFACT as GATHER
from onboard.workflow.remote import client as remote
from onboard.workflow.remote.agreed import check_spec

ARTIFACT = "spec.yaml"
SCHEMA = "spec.schema.json"
"""Beside the spec: editors check and complete it by this."""


class Analyze(Phase):
    """Config, Hugging Face source and module tree -> `spec.yaml`, which a user may edit and
    generate from.
    """

    name = "analyze"
    judges_input: ClassVar[bool] = True
    editable: ClassVar[frozenset[str]] = frozenset({"spec"})

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on config and code, not on weights or memory."""
        gathered = context.read_json(GATHER)
        return {
            key: gathered[key]
            for key in ("model", "revision", "model_type", "files", "remote_code")
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Analyze and write the spec."""
        spec = (
            _of_own_code(context)
            if context.read_json(GATHER)["remote_code"]
            else _of_transformers(context)
        )
        path = context.artifact(ARTIFACT)
        context.files.write(
            path.with_name(SCHEMA), json.dumps(ModelSpec.model_json_schema(), indent=2) + "\n"
        )
        context.files.write(path, f"# yaml-language-server: $schema={SCHEMA}\n{spec.to_yaml()}")
        findings = ", ".join(
            f"{name} {trait.value}" for name, trait in list(spec.traits.items())[:4]
        )
        tricky = f"; {len(spec.tricky)} to look at" if spec.tricky else ""
        return PhaseResult(
            {"spec": context.relative(path)}, f"{spec.architecture}: {findings}{tricky}"
        )


def _of_transformers(context: RunContext) -> ModelSpec:
    from onboard.analysis.analyze import analyze

    config, folder = context.source.config(), context.source.files()
    return analyze(config, folder, model=context.model, revision=context.source.revision)


def _of_own_code(context: RunContext) -> ModelSpec:
    text = remote.call(context, "analyze", model=context.model, revision=context.source.revision)
    spec = ModelSpec.from_yaml(text)
    check_spec(spec, context)
    return spec

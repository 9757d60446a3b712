"""The families that come with the project, and whether their files are what the tool generates
today.

`registry/zoo.yaml` names each family's models and their configs; the first one is what the family's
files are generated from, and the file is proven for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from onboard import registry
from onboard.analysis.spec import ModelSpec
from onboard.config import suggest
from onboard.errors import UsageError
from onboard.registry_text import insert_entry
from onboard.render import render
from onboard.workflow.phases.cookbook import TEMPLATE, notebook_of, notebook_text, notebook_values
from onboard.workflow.phases.generate import same_but_revision
from onboard.workflow.phases.register import (
    gpus_of_config,
    mended,
    new_entry,
    standalone_text,
)
from onboard.workflow.registry_results import Result, load_results
from onboard.workflow.reporting.support_matrix import matrix_path, update_matrix

ZOO = Path("registry", "zoo.yaml")
QUANTISATION = "quantization_config"


@dataclass(frozen=True)
class Drift:
    """A file that is not what the tool generates: `found` is its text, None when it is not
    there.
    """

    path: Path
    expected: str
    found: str | None


def load_zoo(root: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return family -> model id -> fields of its config."""
    path = root / ZOO
    if not path.is_file():
        raise UsageError(f"there is no {ZOO} here", hint="Name a checkout of onboard with --root")
    families: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
        path.read_text(encoding="utf-8")
    )["families"]
    return families


def choose(zoo: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the families that `names` ask for; all of them for none."""
    for name in names:
        if name not in zoo:
            raise UsageError(f"there is no family {name!r} in {ZOO}", hint=suggest(name, zoo))
    return list(names or zoo)


def drifts(family: str, models: Mapping[str, Mapping[str, Any]], root: Path) -> Iterator[Drift]:
    """Yield each file of a family that differs from what the tool generates now.

    Raises `OnboardError` when a model cannot be analysed, or the generated file is not equal to
    transformers for it.
    """
    specs = [_spec(family, name, fields) for name, fields in models.items()]
    released = [_as_released(spec, models[spec.model]) for spec in specs]
    for path, text in [*_family_files(specs, root), *registry_files(released, root)]:
        found = path.read_text(encoding="utf-8") if path.exists() else None
        if found is None or not (found == text or same_but_revision(found, text)):
            yield Drift(path, text, found)


def _spec(family: str, name: str, fields: Mapping[str, Any]) -> ModelSpec:
    from onboard.analysis.analyze import analyze

    unquantised = {key: value for key, value in fields.items() if key != QUANTISATION}
    return analyze({"model_type": family, **unquantised}, model=name)


def _as_released(spec: ModelSpec, fields: Mapping[str, Any]) -> ModelSpec:
    """Return a spec whose config says, too, how the released weights are quantised."""
    released = {key: value for key, value in fields.items() if key == QUANTISATION}
    return spec.model_copy(update={"config": spec.config | released})


def _family_files(specs: Sequence[ModelSpec], root: Path) -> Iterator[tuple[Path, str]]:
    from onboard.codegen.equivalence_test import generate_test_file
    from onboard.codegen.hints.hinted_text import hinted
    from onboard.codegen.model_file import generate_model_file
    from onboard.verify.blocks import prove

    text = hinted(generate_model_file(specs[0]), specs[0])
    for spec in specs:
        prove(text, spec, export=spec is specs[0])
    family = specs[0].family
    yield root / "models" / f"modeling_{family}.py", text
    yield (
        root / "tests" / "equivalence" / f"test_{family}_modeling.py",
        generate_test_file(specs[0], root),
    )


def registry_files(released: Sequence[ModelSpec], root: Path) -> Iterator[tuple[Path, str]]:
    """Yield what the registry has of a family's models: configs, notebooks and tables, from specs
    as released.
    """
    ranks = [gpus_of_config(spec.config, root, spec.model).count for spec in released]
    yield from _model_files(released, ranks, root)
    yield from _tables(released, ranks, root)


def _model_files(
    specs: Sequence[ModelSpec], ranks: Sequence[int], root: Path
) -> Iterator[tuple[Path, str]]:
    for spec, world_size in zip(specs, ranks, strict=True):
        record = _registration(spec)
        yield (
            registry.config_path(root, record["config_id"]),
            standalone_text(spec.model, "auto", spec, root, world_size),
        )
        values = notebook_values(
            spec, record, hub_id=spec.model, folder=None, generation=None, has_tokenizer=True
        )
        yield (
            notebook_of(root, record["config_id"]),
            notebook_text(render(TEMPLATE, root, **values)),
        )


def _tables(
    specs: Sequence[ModelSpec], ranks: Sequence[int], root: Path
) -> Iterator[tuple[Path, str]]:
    """Yield the registry and the support matrix, with rows of what the models are, and what runs of
    them showed.
    """
    models, matrix = registry.models_path(root), matrix_path(root)
    entries, rows = (path.read_text(encoding="utf-8") for path in (models, matrix))
    for spec, world_size in zip(specs, ranks, strict=True):
        record = _registration(spec)
        entry = new_entry(spec, spec.model, record["config_id"], world_size)
        entries, _ = mended(insert_entry(entries, entry), entry)
        rows = update_matrix(rows, spec, record, _results(root, spec.model))
    yield models, entries
    yield matrix, rows


def _results(root: Path, name: str) -> list[Result]:
    return [row for row in load_results(root) if row.name == name]


def _registration(spec: ModelSpec) -> dict[str, Any]:
    config_id = registry.slug(spec.model.rpartition("/")[2])
    return {
        "name": spec.model,
        "config_id": config_id,
        "config": f"registry/configs/{config_id}.yaml",
    }

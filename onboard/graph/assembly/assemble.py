"""The transforms that a run has, from the pipeline's file, the root's, extensions and settings."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from onboard.config import OWN_HEADS, Mode, deep_merge, suggest
from onboard.content import content_path
from onboard.errors import UsageError
from onboard.graph.assembly.outside import in_order, outside_transforms, own_pipeline
from onboard.graph.context import TransformContext
from onboard.graph.transform import BaseTransform, Stages, get_transform, transform_keys, validated

_PIPELINES: dict[Mode, str] = {
    "graph": "default.yaml",
    "hf": "default.yaml",
    "transformers": "transformers.yaml",
}
_OF_HEADS = {key: {"enabled": True} for key in ("detect_head_input_for_capture", "add_draft_heads")}
"""What a run with the checkpoint's own draft heads has besides."""

_PLACE = ("enabled", "stage", "run_per_gm")
"""The fields that say whether, when and on what a transform runs."""


def load_pipeline(
    overrides: Mapping[str, Mapping[str, Any]], mode: Mode = "graph", root: Path | None = None
) -> list[BaseTransform[Any]]:
    """Return the transforms of the mode's pipeline, with `overrides` merged in, in the order in
    which they run.

    Pipelines are `transforms/default.yaml` and, for mode "transformers",
    `transforms/transformers.yaml`; a root's file of that name is merged over the shipped one.
    Installed packages and the root may bring transforms of their own.

    A key with `*` stands for all transforms of that name that the file does not list by their own,
    by name. A transform that no file lists runs when `overrides` names it, at the end of its stage.

    Raises:
        UsageError: an unknown transform or field, with the nearest valid one, or a broken
            extension.
    """
    outside = outside_transforms(root)
    stages = {**transform_keys(), **{key: each.stage for key, each in outside.items()}}
    name = _PIPELINES[mode]
    default = _expanded(deepcopy(_shipped(mode)), stages)
    own = _expanded(own_pipeline(root, name), default)
    _check_known(own, stages, f"transforms/{name} of {root}: ")
    _check_known([*default, *overrides], stages)
    said = deep_merge(own, overrides)
    merged = deep_merge(in_order(default, own, stages), overrides)
    classes = {
        key: outside[key].transform if key in outside else get_transform(key) for key in merged
    }
    transforms = [
        _configured(classes[key], {"stage": stages[key].value, **merged[key]}) for key in merged
    ]
    for transform in transforms:
        transform.asked_for = _asks_for(said.get(transform.key), transform.key in default)
    order = list(Stages)
    return sorted(transforms, key=lambda transform: order.index(transform.config.stage))


def shipped_keys() -> list[str]:
    """Return the keys of the shipped pipeline for generated models, in the order of its file."""
    return list(_expanded(_shipped("graph"), transform_keys()))


def _asks_for(fields: Mapping[str, Any] | None, is_shipped: bool) -> bool:
    """Whether what a user says of a transform (None: nothing) puts it into the pipeline, or keeps
    it there.
    """
    return fields is not None and (not is_shipped or bool(fields.get("enabled", False)))


def pipeline_for(
    context: TransformContext, overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> list[BaseTransform[Any]]:
    """Return the transforms that a run's context asks for, with more `overrides`; what comes from
    outside is a fact.

    Raises:
        UsageError: as `load_pipeline`, or the context moves or leaves out what no run goes without.
    """
    runtime, root = context.runtime, context.factory.root
    asked = {**runtime.transforms, **(_OF_HEADS if runtime.speculative.draft == OWN_HEADS else {})}
    transforms = load_pipeline(asked, runtime.mode, root)
    _check_needed(transforms, _shipped(runtime.mode))
    if overrides:
        transforms = load_pipeline(deep_merge(asked, overrides), runtime.mode, root)
    facts = (each.from_outside() for each in transforms if each.config.enabled)
    context.facts.extend(filter(None, facts))
    return transforms


def _check_needed(transforms: Iterable[BaseTransform[Any]], shipped: Mapping[str, Any]) -> None:
    for each in transforms:
        if each.needed and each.key in shipped:
            whole = validated(each.key, each.config_class, shipped[each.key])
            for field in _PLACE:
                found, needed = str(getattr(each.config, field)), str(getattr(whole, field))
                if found != needed:
                    raise UsageError(
                        f"transforms.{each.key}.{field} is {found}, and no run goes without {each.key}",
                        hint=f"Leave it {needed}",
                    )


def _check_known(keys: Iterable[str], known: Iterable[str], where: str = "") -> None:
    for key in keys:
        if key not in known:
            raise UsageError(
                f"{where}there is no transform {key!r}",
                hint=suggest(key, known, "transforms/default.yaml"),
            )


@cache
def _shipped(mode: Mode) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(
        content_path("transforms", _PIPELINES[mode]).read_text("utf-8")
    )
    return document


def _expanded(pipeline: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the pipeline with a key for each transform that a key with `*` stands for."""
    others = [key for key in keys if key not in pipeline]
    return {
        each: fields
        for key, fields in pipeline.items()
        for each in (fnmatch.filter(others, key) if "*" in key else [key])
    }


def _configured(
    transform: type[BaseTransform[Any]], fields: Mapping[str, Any]
) -> BaseTransform[Any]:
    return transform(validated(transform.key, transform.config_class, fields))

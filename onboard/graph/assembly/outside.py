"""Transforms and pipelines from outside, in the order and under the names that the shipped ones
leave them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from onboard.config import deep_merge, suggest
from onboard.content import CONTENT_ROOT
from onboard.errors import UsageError
from onboard.extensions import Extension, RootFile, find_extensions, load, root_files
from onboard.graph.transform import BaseTransform, Stages, registered, transform_keys
from onboard.ops.library import op_sources


@dataclass(frozen=True)
class Outside:
    """A transform that does not ship, and where it comes from."""

    transform: type[BaseTransform[Any]]
    stage: Stages
    source: str


def outside_transforms(root: Path | None) -> dict[str, Outside]:
    """Run all extensions and return the transforms among them, by key.

    Raises `UsageError` for one that is broken, and for a key that is taken.
    """
    found: dict[str, Outside] = {}
    for extension in find_extensions(root):
        _take(extension, found)
    return found


def listing(root: Path | None) -> Iterator[tuple[str, str]]:
    """Run all extensions; yield where each comes from, and what it brings or what is wrong with
    it.
    """
    found: dict[str, Outside] = {}
    for extension in find_extensions(root):
        try:
            yield extension.source, _described(extension, _take(extension, found))
        except UsageError as error:
            yield extension.source, f"broken: {error}"
    for file in root_files(root):
        if not file.is_extension:
            yield file.source, f"left alone: it says nothing of {' or '.join(file.marks)}"


def _take(extension: Extension, found: dict[str, Outside]) -> dict[str, Outside]:
    """Run an extension, add its transforms to those `found` before, and return them."""
    load(extension)
    own = _brought(extension)
    for key in own.keys() & found.keys():
        if isinstance(extension, RootFile) or found[key].transform is not own[key].transform:
            raise UsageError(
                f"{extension.source}: {found[key].source} has a transform {key!r}", hint=_OTHER_NAME
            )
    found.update(own)
    return own


_OTHER_NAME = "Give it another name"


def _described(extension: Extension, own: Mapping[str, Outside]) -> str:
    if extension.kind == "transforms":
        return ", ".join(f"transform {key} ({each.stage.value})" for key, each in own.items())
    return f"ops {', '.join(_ops(extension.module)) or 'of a namespace of its own'}"


def _ops(module: str) -> list[str]:
    """Return the ops that a module and those below it have registered."""
    sources = {name: source.module for name, source in op_sources().items()}
    return sorted(name for name, own in sources.items() if f"{own}.".startswith(f"{module}."))


def _brought(extension: Extension) -> dict[str, Outside]:
    """Return the transforms that an extension has registered; raise `UsageError` for one that
    cannot be used.
    """
    if extension.kind != "transforms":
        return {}
    classes = dict(_classes(extension))
    source = extension.source
    if isinstance(extension, RootFile) and list(classes) != [extension.path.stem]:
        named = ", ".join(map(repr, classes)) or "no transform"
        raise UsageError(
            f"{source} registers {named}",
            hint=f"Its name says one transform: register_transform('{extension.path.stem}')",
        )
    if not classes:
        raise UsageError(
            f"{source} registers no transform", hint="Its import has to use register_transform"
        )
    return {key: Outside(cls, _stage(extension, key, cls), source) for key, cls in classes.items()}


def _classes(extension: Extension) -> Iterator[tuple[str, type[BaseTransform[Any]]]]:
    for key, cls in registered(extension.module):
        if key in transform_keys():
            raise UsageError(
                f"{extension.source}: there is a shipped transform {key!r}", hint=_OTHER_NAME
            )
        if (
            not isinstance(cls, type)
            or not issubclass(cls, BaseTransform)
            or inspect.isabstract(cls)
        ):
            raise UsageError(
                f"{extension.source}: {key} is no BaseTransform with a method `apply` or `rewrite`"
            )
        cls.origin = extension.source
        yield key, cls


def _stage(extension: Extension, key: str, cls: type[BaseTransform[Any]]) -> Stages:
    """Return the stage that a file's folder, or a package's class, names."""
    stage = extension.path.parent.name if isinstance(extension, RootFile) else cls.home
    if stage not in list(Stages):
        raise UsageError(
            f"{extension.source}: {key} has no stage {str(stage)!r}",
            hint=suggest(str(stage), Stages),
        )
    return Stages(stage)


def own_pipeline(root: Path | None, name: str) -> dict[str, dict[str, Any]]:
    """Return what a root's pipeline of that name says, {} without one; raise `UsageError` for a
    file that is none.
    """
    path = _pipeline_path(root, name)
    if path is None:
        return {}
    source = f"transforms/{name}"
    try:
        document = yaml.safe_load(path.read_text("utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{source} of {root} is not YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(document, dict):
        raise UsageError(
            f"{source} of {root} holds a {type(document).__name__}", hint=_PIPELINE_FORM
        )
    for key, fields in document.items():
        if not isinstance(key, str) or not isinstance(fields, dict | None):
            raise UsageError(f"{source} of {root}: {key!r} has {fields!r}", hint=_PIPELINE_FORM)
    return {key: fields or {} for key, fields in document.items()}


_PIPELINE_FORM = "It maps keys of transforms to their fields"


def _pipeline_path(root: Path | None, name: str) -> Path | None:
    if root is None or root.resolve() == CONTENT_ROOT:
        return None
    path = root / "transforms" / name
    return path if path.is_file() else None


def in_order(
    pipeline: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]], stages: Mapping[str, Stages]
) -> dict[str, Any]:
    """Return `pipeline` with `own` merged over it, each new transform where `own` has it among
    those of its stage.

    That is behind the one that it follows there, else before the one that it precedes; at the end
    if it is alone.
    """
    merged, order, listed = deep_merge(pipeline, own), list(pipeline), list(own)

    def stage_of(key: str) -> str:
        return str(merged[key].get("stage", stages[key]))

    def of_same_stage(keys: Iterable[str], key: str) -> Iterator[str]:
        return (each for each in keys if each in order and stage_of(each) == stage_of(key))

    for index, key in enumerate(listed):
        if key not in pipeline:
            before = next(of_same_stage(reversed(listed[:index]), key), None)
            after = next(of_same_stage(listed[index + 1 :], key), None)
            place = (
                order.index(before) + 1 if before else order.index(after) if after else len(order)
            )
            order.insert(place, key)
    return {key: merged[key] for key in order}

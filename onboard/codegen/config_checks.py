"""What a config class's methods leave behind, and whether a class written anew makes the same."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from transformers import PretrainedConfig

from onboard.analysis.source import find_method
from onboard.errors import OnboardError
from onboard.plain_config import OldFields, PlainConfig

_CHANGING = {
    *("append", "extend", "insert", "update", "pop", "popitem", "setdefault", "clear"),
    *("remove", "sort", "reverse", "add", "discard", "setattr", "delattr", "vars", "exec"),
    *("__setattr__", "__delattr__"),
}
"""Names of functions and methods that change an object."""


def leaves_something(config_class: type, method: ast.FunctionDef, seen: frozenset[str]) -> bool:
    """Whether a method of a config class may do more than check: it stores or changes something, or
    calls another method that does.
    """
    nodes = [node for statement in method.body for node in ast.walk(statement)]
    return any(_stores(node) or _calls_one(config_class, node, seen) for node in nodes)


def _stores(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(ctx=context) | ast.Subscript(ctx=context):
            return not isinstance(context, ast.Load)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _CHANGING
    return False


def _calls_one(config_class: type, node: ast.AST, seen: frozenset[str]) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            found = find_method(config_class, name)
            if found is None or name in seen:
                return found is None
            return leaves_something(config_class, found[1], seen | {name})
    return False


def check_same_values(
    config_class: type[PretrainedConfig], text: str, values: Mapping[str, Any]
) -> None:
    """Raise `OnboardError` unless the class of a text makes of a config.json what the repository's
    class makes of it.
    """
    theirs = fields(config_class.from_dict(deepcopy(dict(values))))
    try:
        ours = fields(_made(config_class, text).from_dict(deepcopy(dict(values))))
    except ValueError as error:  # of a branch that is not written
        raise OnboardError(str(error)) from None
    missing = object()
    for name in sorted(theirs.keys() | ours.keys()):
        one, other = theirs.get(name, missing), ours.get(name, missing)
        if repr(one) != repr(other) and one != other:
            found = "nothing" if other is missing else repr(other)[:60]
            wanted = "nothing" if one is missing else repr(one)[:60]
            raise OnboardError(
                f"the config class {config_class.__name__} cannot be written anew: its {name} is "
                f"{wanted}, and {found} of its constructor's values alone"
            )


def _made(config_class: type[PretrainedConfig], text: str) -> Any:
    bases = {base.__name__: base for base in config_class.__mro__[1:]}
    names = {"PlainConfig": PlainConfig, "OldFields": OldFields, "math": math, **bases}
    exec(text, names)  # of `plain_config_class`: values and arithmetic
    return names[config_class.__name__]


def fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the public fields, of configs inside too; a model type is what config.json says."""
    public = {
        name: value
        for name, value in vars(config).items()
        if not name.startswith("_") and name != "model_type"
    }
    return {
        name: fields(value) if isinstance(value, PretrainedConfig) else value
        for name, value in public.items()
    }

"""Objects that a file makes when it is imported, `DEFAULT = Settings(...)`: what they keep is known, and
generated code has it where it is read.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.forms import LIST
from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.partial_classes import Partial, partial_class
from onboard.codegen.translate.language.values import Items, Known, Mapping, Unread, Value

_PLAIN = (bool, int, float, str, type(None))
_NO_OBJECTS = (type, torch.Tensor, nn.Module, Enum, *_PLAIN, list, tuple, dict, set)
_MOST = 32
"""Items of a list that stands where it is read."""
Named = Callable[[Any], Value]
"""What a class or a function is, by its name."""


def object_of(obj: object, package: str, named: Named) -> Value | None:
    """Return an object of a class of the repository's package, or a list or dict with such, as what it
    keeps; None for others, and those of transformers.
    """
    if package == "transformers" or not _holds_own(obj, package):
        return None
    return _value_of(obj, package, named)


def _is_own(obj: object, package: str) -> bool:
    own = type(obj).__module__.split(".")[0] == package
    return own and not isinstance(obj, _NO_OBJECTS) and hasattr(obj, "__dict__")


def _holds_own(obj: object, package: str) -> bool:
    if isinstance(obj, dict):
        return all(isinstance(key, str) for key in obj) and any(
            _holds_own(item, package) for item in obj.values()
        )
    if isinstance(obj, list | tuple):
        return any(_holds_own(item, package) for item in obj)
    return _is_own(obj, package)


def _value_of(obj: Any, package: str, named: Named, within: tuple[object, ...] = ()) -> Value:
    """Return what is known of a value; of another kind, and of what holds itself, nothing."""
    if isinstance(obj, _PLAIN):
        return Known(obj)
    parts = vars(obj) if _is_own(obj, package) else obj
    inside = (*within, obj)
    if any(obj is each for each in within):
        return Unread(f"{type(obj).__name__}(...), which holds itself")
    if isinstance(parts, dict) and all(isinstance(key, str) for key in parts):
        found = {key: _value_of(item, package, named, inside) for key, item in parts.items()}
        return Mapping(found) if parts is obj else Output(found, type(obj), given=True)
    if isinstance(obj, list | tuple):
        items = tuple(_value_of(item, package, named, inside) for item in obj)
        return Items(items, kind=LIST) if isinstance(obj, list) else Items(items)
    if inspect.isclass(obj) or inspect.isroutine(obj):
        return named(obj)
    return Unread(f"a {type(obj).__name__} that the file has made")


def partial_of(obj: functools.partial[Any], named: Named) -> Partial | None:
    """Return a function, or a class of modules, that a file gives some arguments before it is called,
    `norm = partial(Norm, eps=1e-6)`; None of other things.
    """
    module = inspect.isclass(obj.func) and issubclass(obj.func, nn.Module)
    if not (module or inspect.isroutine(obj.func)):
        return None
    called, *rest = (named(item) for item in (obj.func, *obj.args))
    keywords = {key: named(item) for key, item in obj.keywords.items()}
    if module:
        return partial_class(Args([called, *rest], keywords, []))
    return Partial(called, Args(rest, keywords, [])) if isinstance(called, Global) else None


def written_out(obj: object, identifier: str, tree: ast.Module) -> ast.List | ast.Tuple | None:
    """Return a list or tuple of a few constants that a file has, and does nothing with but read it, as
    it stands where it is read; None for others.
    """
    if not isinstance(obj, list | tuple) or not all(map(_is_literal, obj)) or len(obj) > _MOST:
        return None
    if any(_may_change(node, identifier) for node in ast.walk(tree)):
        return None
    items: list[ast.expr] = [*map(ast.Constant, obj)]
    return (ast.List if isinstance(obj, list) else ast.Tuple)(items, ast.Load())


def _is_literal(item: Any) -> bool:
    if isinstance(item, float):
        return math.isfinite(item)
    return type(item) in (int, str, bool)


def _may_change(node: ast.AST, identifier: str) -> bool:
    """Whether a node changes a list under a name, calls a method of it that may, or binds it anew."""
    match node:
        case ast.Global(names=names):
            return identifier in names
        case ast.Subscript(value=ast.Name(id=owner), ctx=ast.Store() | ast.Del()):
            return owner == identifier
        case ast.AugAssign(target=ast.Name(id=owner)):
            return owner == identifier
        case ast.Attribute(value=ast.Name(id=owner), attr=attr):
            return owner == identifier and attr not in ("index", "count")
    return False

"""What a repository's code leaves at its modules, classes and objects: put back, begun anew, counted."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from typing import Any

from torch import nn

from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.source import module_source

_HELD = (dict, list, set)


@contextmanager
def begun_anew() -> Iterator[None]:
    """Have code hold what it does when it is imported, and put back what it holds now."""
    spaces = list(_spaces())
    before = [dict(vars(space)) for space in spaces]
    copies = [{k: copy.copy(v) for k, v in old.items() if type(v) in _HELD} for old in before]
    _clear_memos()
    try:
        for space in spaces:
            for name, value in _first_values(space).items():
                setattr(space, name, value)
        yield
    finally:
        _clear_memos()
        for space, old, held in zip(spaces, before, copies, strict=True):
            _put_back(space, old, held)


def counts(model: nn.Module) -> dict[str, Any]:
    """Return the numbers, and the lengths of lists, that code and modules hold."""
    spaces = {getattr(space, "__qualname__", repr(type(space))): vars(space) for space in _spaces()}
    spaces |= {path: vars(module) for path, module in model.named_modules()}
    found = {f"{place}.{key}": v for place, held in spaces.items() for key, v in list(held.items())}
    return {
        place: len(value) if type(value) is list else value
        for place, value in found.items()
        if type(value) in (int, float, bool, str, list)
    }


def _put_back(space: Any, old: dict[str, Any], held: dict[str, Any]) -> None:
    for key, value in list(vars(space).items()):
        if key not in old:
            delattr(space, key)
        elif value is not old[key]:
            setattr(space, key, old[key])
    for key, value in held.items():
        if isinstance(old[key], list):
            old[key][:] = value
        elif old[key] != value or len(old[key]):
            old[key].clear()
            old[key].update(value)


def _first_values(space: Any) -> dict[str, Any]:
    """Return the literals that a module or class assigns where it is defined."""
    try:
        if inspect.ismodule(space):
            body = module_source(space.__name__).tree.body
        elif isinstance(space, type):
            body = module_source(space.__module__).classes[space.__qualname__].body
        else:
            return {}
    except Exception:  # it has no source of its own
        return {}
    found: dict[str, Any] = {}
    for node in body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                found[name] = _literal(value)
    return {k: v for k, v in found.items() if v is None or type(v) in _HELD}


_NO_LITERAL = object()


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and ast.unparse(node) in ("dict()", "list()", "set()"):
        return {"dict()": {}, "list()": [], "set()": set()}[ast.unparse(node)]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _NO_LITERAL


def _clear_memos() -> None:
    """Forget what `functools.cache` holds."""
    for space in _spaces():
        for value in list(vars(space).values()):
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, _lru_cache_wrapper):
                function.cache_clear()


def _spaces() -> Iterator[Any]:
    """Yield the modules of the repository's code, their classes, and objects of these."""
    found: dict[int, Any] = {}
    for name in [key for key in sys.modules if key.startswith(f"{PACKAGE}.")]:
        waiting = [sys.modules[name]]
        while waiting:
            space = waiting.pop()
            if id(space) in found:
                continue
            found[id(space)] = space
            waiting += [value for value in list(vars(space).values()) if _is_own(value)]
    yield from found.values()


def _is_own(value: Any) -> bool:
    cls = value if isinstance(value, type) else type(value)
    own = str(getattr(cls, "__module__", "")).startswith(f"{PACKAGE}.")
    return own and hasattr(value, "__dict__") and not isinstance(value, nn.Module)

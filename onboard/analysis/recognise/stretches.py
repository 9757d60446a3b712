"""Stretches of a method's statements that are run alone, with the variables of a recorded call or
with others in their place.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.source import find_method

_RESULT = "result"
_OF_FORM = ("dtype", "device", "shape", "size", "numel", "new_zeros", "new_full")
"""Attributes and methods of a tensor that do not ask for its numbers."""
_ALIKE = (
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "view_as",
    "reshape_as",
    "expand_as",
)
"""Functions and methods that ask for the form of a tensor that they are given."""


@dataclass(frozen=True)
class Region:
    """Statements of a method, one after the other: `begin` is the first one's number among all of
    the method's, those inside others too.
    """

    method: str
    begin: int
    statements: tuple[ast.stmt, ...]
    behind: frozenset[str]
    """Variables that the method reads behind them."""


def statements_of(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those inside them, in the order of the text."""
    for block in blocks_of(body):
        yield from block


def blocks_of(body: Sequence[ast.stmt]) -> Iterator[Sequence[ast.stmt]]:
    """Yield a body, then those inside it."""
    yield body
    for statement in body:
        for part in ("body", "orelse"):
            if inner := getattr(statement, part, []):
                yield from blocks_of(inner)


def regions_of(cls: type, *attrs: str) -> Iterator[Region]:
    """Yield statements of methods that have all of a body's mentions of `self.<attr>` of each
    attribute among them, or all behind a branch that returns; those that begin late and end early
    come first.
    """
    for name, _ in inspect.getmembers(cls, inspect.isfunction):
        found = find_method(cls, name)
        if found is None or name == "__init__":
            continue
        every = list(statements_of(found[1].body))
        for block in blocks_of(found[1].body):
            for first in _starts(block):
                places = [i for i in range(first, len(block)) if _mentions(block[i], attrs)]
                for begin in range(places[0], first - 1, -1) if places else ():
                    for end in range(places[-1] + 1, len(block) + 1):
                        part = tuple(block[begin:end])
                        behind = _read_behind(found[1], part)
                        yield Region(name, every.index(block[begin]), part, behind)


def regions_around(cls: type, *attrs: str) -> Iterator[Region]:
    """Yield such statements of methods that call others of the class which mention the attributes."""
    methods = _methods(cls)
    inside: set[str] = set()
    while more := {x for x in methods if _mentions(methods[x], {*attrs, *inside})} - inside:
        inside |= more
    callers = {name for name in inside if _mentions(methods[name], inside)}
    for region in regions_of(cls, *attrs, *inside) if callers else ():
        if region.method in callers:
            yield region


def nodes_of(cls: type, region: Region) -> Iterator[ast.AST]:
    """Yield what a region is made of, and the methods of the class that it calls."""
    methods = _methods(cls)
    trees: list[ast.AST] = [*region.statements]
    for tree in trees:
        yield from ast.walk(tree)
        called = (node for node in methods.values() if node not in trees)
        trees += [node for node in called if _mentions(tree, {node.name})]


def _methods(cls: type) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class but its constructor, and but those of all modules."""
    named = (name for name, _ in inspect.getmembers(cls, inspect.isfunction))
    found = {name: find_method(cls, name) for name in named if name != "__init__"}
    return {key: x[1] for key, x in found.items() if x is not None and x[0] is not nn.Module}


def _starts(block: Sequence[ast.stmt]) -> list[int]:
    """Return where a body begins, and goes on behind a branch that returns; later ones first."""
    behind = [
        place + 1
        for place, item in enumerate(block)
        if isinstance(item, ast.If) and isinstance(item.body[-1], ast.Return) and not item.orelse
    ]
    return [*reversed(behind), 0]


def _mentions(tree: ast.AST, attrs: Collection[str]) -> bool:
    return not _mentioned(tree).isdisjoint(attrs)


@lru_cache(maxsize=1 << 14)
def _mentioned(tree: ast.AST) -> frozenset[str]:
    """Return the attributes of `self` in code as it was read, of which many regions are asked;
    `getattr` for one whose name is made there.
    """
    return frozenset(attr for node in ast.walk(tree) if (attr := _own_attribute(node)) is not None)


def _own_attribute(node: ast.AST) -> str | None:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            return attr
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), key, *_]):
            return None if isinstance(key, ast.Constant) else "getattr"
    return None


def _read_behind(method: ast.FunctionDef, part: Sequence[ast.stmt]) -> frozenset[str]:
    end = part[-1].end_lineno or 0
    return frozenset(name for name, line in _names_read(method) if line > end)


@lru_cache(maxsize=1 << 12)
def _names_read(method: ast.FunctionDef) -> frozenset[tuple[str, int]]:
    """Return the variables that a method reads, and the lines where it does."""
    return frozenset(
        (node.id, node.lineno)
        for node in ast.walk(method)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )


def locals_of(module: nn.Module, call: ModuleCall) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the variables before the first run of each line of a module's methods, by method and
    line.
    """
    codes = {
        inspect.unwrap(function).__code__: name
        for name, function in inspect.getmembers(type(module), inspect.isfunction)
    }
    seen: dict[tuple[str, int], dict[str, Any]] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        method = codes.get(frame.f_code)
        if method is None or frame.f_locals.get("self") is not module:
            return None
        if event == "line":
            seen.setdefault((method, frame.f_lineno), dict(frame.f_locals))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with torch.no_grad():
            module(*call.args, **call.kwargs)
    except REFUSED:
        return {}  # its inputs were changed while it ran
    finally:
        sys.settrace(before)
    return seen


def read_first(statements: Sequence[ast.stmt]) -> tuple[str, ...]:
    """Return the variables that statements read before they assign them, and not just the dtype, the
    device or the shape of.
    """
    return _read_first(tuple(statements))


@lru_cache(maxsize=1 << 12)
def _read_first(statements: tuple[ast.stmt, ...]) -> tuple[str, ...]:
    read: dict[str, None] = {}
    made: set[str] = set()
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        whole = {
            node.id for item in targets for node in ast.walk(item) if isinstance(node, ast.Name)
        }
        plain = {name for name in whole if not _loads(name, statement)}
        asked = {id(node) for each in ast.walk(statement) for node in _asked(each)}
        for node in ast.walk(statement):
            if (
                isinstance(node, ast.Name)
                and node.id not in (made | plain)
                and id(node) not in asked
            ):
                read[node.id] = None
        made |= whole
    return tuple(read)


def _asked(node: ast.AST) -> list[ast.expr]:
    """Return what a node asks for dtype, device or shape, and nothing else."""
    match node:
        case ast.Attribute(value=value, attr=attr) if attr in _OF_FORM:
            return [value]
        case ast.Call(func=ast.Attribute(attr=attr), args=[first, *_]) if attr in _ALIKE:
            return [first]
    return []


def _loads(name: str, statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(statement)
    )


@lru_cache(maxsize=1 << 12)
def result_of(region: Region, *, in_place: bool = False) -> str | None:
    """Return the one variable that a region makes for what comes behind it, or changes in place;
    `result` where it ends with a return.
    """
    inside = [node for item in region.statements for node in ast.walk(item)]
    if any(map(_leaves_a_loop, region.statements)):
        return None
    returns = [node for node in inside if isinstance(node, ast.Return)]
    if returns:
        return _RESULT if returns == [region.statements[-1]] else None
    stored = {
        node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    changed = {key for node in inside if (key := _changed(node)) is not None} if in_place else set()
    left = sorted((stored | changed) & region.behind)
    return left[0] if len(left) == 1 else None


def _leaves_a_loop(node: ast.stmt) -> bool:
    """Whether a statement ends a turn of a loop around it, and so does not run alone."""
    if isinstance(node, ast.Continue | ast.Break):
        return True
    parts = [] if isinstance(node, ast.For | ast.While) else ["body", "orelse"]
    return any(_leaves_a_loop(item) for part in parts for item in getattr(node, part, []))


def _changed(node: ast.AST) -> str | None:
    """Return the variable that a statement changes in place: `y[mask] += x`, `y.add_(x)`."""
    match node:
        case ast.Subscript(value=ast.Name(id=key), ctx=ast.Store()):
            return key
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=key), attr=attr))):
            return key if attr.endswith("_") and not attr.endswith("__") else None
    return None


def function_of(
    module: nn.Module, region: Region, variables: dict[str, Any], result: str
) -> Callable[..., Any]:
    """Return a function of the variables that runs a region and returns what it makes."""
    text = "\n".join(ast.unparse(item) for item in region.statements)
    if not isinstance(region.statements[-1], ast.Return):
        text += f"\nreturn {result}"
    body = "\n".join(f"    {line}" for line in text.splitlines())
    found = find_method(type(module), region.method)
    assert found is not None
    names = dict(vars(sys.modules[found[0].__module__]))
    exec(f"def region({', '.join(variables)}):\n{body}", names)  # of code that was run before
    function: Callable[..., Any] = names["region"]
    return function


def sorts_around(cls: type, region: Region) -> bool:
    """Whether a region's method sorts something outside of it."""
    method = find_method(cls, region.method)
    inside = {id(node) for statement in region.statements for node in ast.walk(statement)}
    return method is not None and any(
        isinstance(node, ast.Attribute)
        and node.attr in ("argsort", "sort")
        and id(node) not in inside
        for node in ast.walk(method[1])
    )

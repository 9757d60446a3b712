"""Helper functions that a config's constructor calls, written where they are called: those that come
down to an expression, numpy's in plain Python.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from onboard.codegen.translate.language.program.argument_facts import default_nodes
from onboard.codegen.translate.language.trees.enumerations import MembersAsValues

_LIBRARIES = ("torch", "np", "numpy")
_OF_NUMBERS = ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "floor", "ceil")
"""Functions of numpy that math has, too."""
_INDEX = "index_of_step"
"""The variable of lists that stand for numpy's."""


def written_out(
    node: ast.FunctionDef,
    functions: Mapping[str, ast.FunctionDef],
    namespace: Mapping[str, Any] | None = None,
) -> ast.FunctionDef:
    """Return a constructor that calls none of a module's functions but those that do more than
    compute one value, and has the values of enumerations in `namespace` for their members.
    """
    made: ast.FunctionDef = _WrittenOut(functions).visit(deepcopy(node))
    made = MembersAsValues(namespace or {}).visit(made)
    return ast.fix_missing_locations(made)


class _WrittenOut(ast.NodeTransformer):
    """Writes what a function gives in the place of its call."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.functions = functions

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Write it out, inner calls first; a function's own calls, too, but not of itself."""
        self.generic_visit(node)
        if (plain := _without_library(node)) is not None:
            return plain
        called = self.functions.get(node.func.id) if isinstance(node.func, ast.Name) else None
        value = None if called is None else _expression(called.body)
        given = None if called is None else _bound(called, node)
        if called is None or value is None or given is None or not _is_closed(value, given):
            return node
        others = {key: item for key, item in self.functions.items() if item is not called}
        inner: ast.expr = _WrittenOut(others).visit(deepcopy(value))
        made: ast.expr = _Replaced(given).visit(inner)
        return ast.copy_location(made, node)


def _without_library(node: ast.Call) -> ast.expr | None:
    """Return a call of numpy, torch or `numbers` as plain Python; None for others."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(args=[*bounds], keywords=[]) as made, attr="tolist")
        ) if _is_of_library(made.func, "arange"):
            return _at(node, f"list(range({', '.join(map(ast.unparse, bounds))}))")
        case ast.Call(args=[first, last, number]) if _is_of_library(node.func, "linspace"):
            return _spaced(node, first, last, number)
        case ast.Call(args=[first, last]) if _is_of_library(node.func, "linspace"):
            named = next((item.value for item in node.keywords if item.arg == "num"), None)
            return None if named is None else _spaced(node, first, last, named)
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="np" | "numpy"), attr=attr),
            args=[ast.Constant(value=int() | float() as value)],
            keywords=[],
        ) if attr in _OF_NUMBERS and 0 < value < 700:
            return _at(node, repr(float(getattr(math, attr)(value))))
        case ast.Call(func=ast.Name(id="isinstance"), args=[value, kind]) if ast.unparse(kind) in (
            "Number",
            "numbers.Number",
        ):
            return _at(node, f"isinstance({ast.unparse(value)}, (int, float))")
    return None


def _is_of_library(function: ast.expr, attr: str) -> bool:
    return ast.unparse(function) in [f"{library}.{attr}" for library in _LIBRARIES]


def _spaced(node: ast.Call, first: ast.expr, last: ast.expr, number: ast.expr) -> ast.expr:
    """Return a list of that many numbers in equal steps, as numpy computes them but for the last,
    which it sets.
    """
    low, high, count = (f"({ast.unparse(item)})" for item in (first, last, number))
    step = f"(({high} - {low}) / max({count} - 1, 1))"
    return _at(node, f"[{_INDEX} * {step} + {low} for {_INDEX} in range({count})]")


def _at(node: ast.Call, text: str) -> ast.expr:
    return ast.copy_location(ast.parse(text, mode="eval").body, node)


def body_with(method: ast.FunctionDef, call: ast.Call) -> list[ast.stmt] | None:
    """Return a method's statements with the arguments of a call for its parameters; None where they
    cannot be told, or where it assigns these.
    """
    function = deepcopy(method)
    if not any(ast.unparse(item) == "staticmethod" for item in method.decorator_list):
        del function.args.args[:1]  # self
    given = _bound(function, call)
    stored = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    if given is None or stored & given.keys():
        return None
    return [_Replaced(given).visit(statement) for statement in _to_the_end(function.body)]


def _to_the_end(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements that do the same without an early `return`: what follows `if test: return`
    is done where the test fails.
    """
    match body:
        case [ast.Return(value=None), *_]:
            return []
        case [ast.If(test=test, body=[*first, ast.Return(value=None)], orelse=[]) as node, *rest]:
            after = _to_the_end(rest)
            if first := _to_the_end(first):
                return [ast.copy_location(ast.If(test, first, after), node)]
            otherwise = ast.If(_opposite(test), after, [])
            return [ast.copy_location(otherwise, node)] if after else []
        case [statement, *rest]:
            return [statement, *_to_the_end(rest)]
    return []


def _opposite(test: ast.expr) -> ast.expr:
    match test:
        case ast.Compare(left=left, ops=[ast.Is()], comparators=other):
            return ast.copy_location(ast.Compare(left, [ast.IsNot()], other), test)
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def _bound(called: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """Return the arguments of a call by parameter; None where they cannot be told."""
    arguments = called.args
    names = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
    starred = any(isinstance(item, ast.Starred) for item in call.args)
    if starred or arguments.vararg or arguments.kwarg or len(call.args) > len(names):
        return None
    given = default_nodes(called) | dict(zip(names, call.args, strict=False))
    given |= {item.arg: item.value for item in call.keywords if item.arg is not None}
    wanted = {*names, *(item.arg for item in arguments.kwonlyargs)}
    return given if given.keys() == wanted else None


def _is_closed(value: ast.expr, given: Mapping[str, ast.expr]) -> bool:
    """Whether an expression binds no variables of its own, and reads parameters and builtins alone."""
    names = {item.id for item in ast.walk(value) if isinstance(item, ast.Name)}
    binds = any(isinstance(item, ast.comprehension | ast.Lambda) for item in ast.walk(value))
    return not binds and all(key in given or hasattr(builtins, key) for key in names)


def _expression(body: Sequence[ast.stmt]) -> ast.expr | None:
    """Return what statements that only decide, name and return come down to; None for others.
    Checks go.
    """
    match body:
        case [ast.Expr(value=ast.Constant()) | ast.Assert(), *rest]:
            return _expression(rest)
        case [ast.If(body=[ast.Raise()], orelse=[]), *rest]:
            return _expression(rest)
        case [ast.If(body=first, orelse=[ast.Raise()]), *rest]:
            return _expression([*first, *rest])
        case [ast.AugAssign(target=ast.Name(id=variable) as old, op=op, value=value), *rest]:
            changed = ast.BinOp(ast.Name(variable, ast.Load()), op, value)
            return _expression([ast.copy_location(ast.Assign([old], changed), old), *rest])
        case [ast.Return(value=ast.expr() as value), *_]:
            return value
        case [ast.If(test=test, body=first, orelse=second), *rest]:
            sides = _expression([*first, *rest]), _expression([*second, *rest])
            if sides[0] is None or sides[1] is None:
                return None
            return ast.IfExp(test, sides[0], sides[1])
        case [ast.Assign(targets=[ast.Name(id=variable)], value=value), *rest]:
            after = _expression(rest)
            return None if after is None else _Replaced({variable: value}).visit(deepcopy(after))
    return None


class _Replaced(ast.NodeTransformer):
    """Writes expressions in the place of variables."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Write its value."""
        return deepcopy(self.values.get(node.id, node))

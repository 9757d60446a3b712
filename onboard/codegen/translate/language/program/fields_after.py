"""Fields of a dataclass behind its `__post_init__`, worked out of those that it is made with."""

from __future__ import annotations

import ast
import inspect
import sys
import warnings
from collections.abc import Mapping
from copy import deepcopy

from onboard.analysis.source import find_method, function_node

_MOST = 200
"""Nodes of an expression: a longer one is no field."""


class NotWorkedOut(Exception):
    """It does more than to assign fields what follows from others."""


def fields_after(cls: type, fields: Mapping[str, ast.expr]) -> dict[str, ast.expr] | None:
    """Return the fields of an object that `__post_init__` has changed, given those before; None
    where it does more than to assign them expressions, some of them under conditions.
    """
    found = find_method(cls, "__post_init__")
    if found is None or len(found[1].args.args) != 1:
        return None
    before = {f"self.{key}": value for key, value in fields.items()}
    try:
        after = _Work(found[0].__module__).run(found[1].body, before)
    except NotWorkedOut:
        return None
    return {key.removeprefix("self."): value for key, value in after.items()}


class WithValues(ast.NodeTransformer):
    """Writes what parameters and attributes stand for."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a parameter."""
        return deepcopy(self.values.get(node.id, node))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace an attribute of the object."""
        known = self.values.get(ast.unparse(node))
        return self.generic_visit(node) if known is None else deepcopy(known)


class _Work(WithValues):
    """Writes statements that assign, and functions that return, as expressions of what is known."""

    def __init__(self, module: str, values: Mapping[str, ast.expr] | None = None) -> None:
        super().__init__(values or {})
        self.module = module

    def run(self, body: list[ast.stmt], values: Mapping[str, ast.expr]) -> Mapping[str, ast.expr]:
        """Return what fields are after statements."""
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"))], value=value):
                    target = ast.unparse(statement.targets[0])
                    values = {**values, target: self.made(value, values)}
                case ast.AugAssign(
                    target=ast.Attribute(value=ast.Name(id="self")) as field, op=op, value=value
                ):
                    made = self.made(ast.BinOp(field, op, value), values)
                    values = {**values, ast.unparse(field): made}
                case ast.If():
                    test = self.made(statement.test, values)
                    ways = [self.run(way, values) for way in (statement.body, statement.orelse)]
                    values = _either(test, *ways)
                case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Assert():
                    pass
                case _:
                    raise NotWorkedOut
        return values

    def made(self, node: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
        """Return an expression of what `values` are made of."""
        made: ast.expr = _Work(self.module, values).visit(deepcopy(node))
        if sum(1 for _ in ast.walk(made)) > _MOST:
            raise NotWorkedOut
        return made

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace the call of a function of the same file, or of one that this imports, by what it
        returns.
        """
        function = getattr(sys.modules[self.module], ast.unparse(node.func), None)
        if not inspect.isfunction(function) or function.__module__.startswith("math"):
            return self.generic_visit(node)
        found = function_node(function)
        if found is None or found.decorator_list:
            raise NotWorkedOut
        try:
            bound = inspect.signature(function).bind(
                *(self.visit(item) for item in node.args),
                **{str(item.arg): self.visit(item.value) for item in node.keywords},
            )
        except TypeError as error:  # stars, say
            raise NotWorkedOut from error
        if bound.arguments.keys() != inspect.signature(function).parameters.keys():
            raise NotWorkedOut
        return _Work(function.__module__).returned(found.body, bound.arguments)

    def returned(self, body: list[ast.stmt], values: Mapping[str, ast.expr]) -> ast.expr:
        """Return what a function returns whose statements choose between expressions."""
        match body:
            case [ast.Expr(value=ast.Constant()), *rest]:
                return self.returned(rest, values)
            case [ast.Return(value=ast.expr() as value), *_]:
                return self.made(value, values)
            case [ast.If(test=test, body=one, orelse=other), *rest]:
                ways = [self.returned([*way, *rest], values) for way in (one, other)]
                return _chosen(self.made(test, values), *ways)
        raise NotWorkedOut


def _either(
    test: ast.expr, one: Mapping[str, ast.expr], other: Mapping[str, ast.expr]
) -> dict[str, ast.expr]:
    """Return the fields after a condition."""
    if one.keys() != other.keys():
        raise NotWorkedOut
    return {key: _chosen(test, one[key], other[key]) for key in one}


def _chosen(test: ast.expr, one: ast.expr, other: ast.expr) -> ast.expr:
    """Return `one if test else other`, or that of them which a constant test chooses."""
    if ast.dump(one) == ast.dump(other):
        return one
    if any(isinstance(node, ast.Name | ast.Call | ast.Attribute) for node in ast.walk(test)):
        return ast.IfExp(test, one, other)
    with warnings.catch_warnings(action="ignore"):  # of `3 is None`
        return one if eval(ast.unparse(test), {"__builtins__": {}}) else other

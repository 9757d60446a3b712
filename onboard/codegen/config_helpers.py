"""Helper functions that a config's constructor calls, written where they are called: those that come
down to an expression.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence
from copy import deepcopy

from onboard.codegen.translate.language.program.argument_facts import default_nodes


def written_out(node: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> ast.FunctionDef:
    """Return a constructor that calls none of a module's functions but those that do more than
    compute one value.
    """
    made: ast.FunctionDef = _WrittenOut(functions).visit(deepcopy(node))
    return ast.fix_missing_locations(made)


class _WrittenOut(ast.NodeTransformer):
    """Writes what a function gives in the place of its call."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.functions = functions

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Write it out, inner calls first; a function's own calls, too, but not of itself."""
        self.generic_visit(node)
        if (counted := _counted(node)) is not None:
            return counted
        called = self.functions.get(node.func.id) if isinstance(node.func, ast.Name) else None
        value = None if called is None else _expression(called.body)
        given = None if called is None else _bound(called, node)
        if called is None or value is None or given is None or not _is_closed(value, given):
            return node
        others = {key: item for key, item in self.functions.items() if item is not called}
        inner: ast.expr = _WrittenOut(others).visit(deepcopy(value))
        made: ast.expr = _Replaced(given).visit(inner)
        return ast.copy_location(made, node)


def _counted(node: ast.Call) -> ast.expr | None:
    """Return `list(range(...))` for `torch.arange(...).tolist()`."""
    match node:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="torch" | "np" | "numpy"), attr="arange"),
                    args=[*bounds],
                    keywords=[],
                ),
                attr="tolist",
            )
        ):
            numbers = ast.Call(ast.Name("range", ast.Load()), bounds, [])
            return ast.copy_location(ast.Call(ast.Name("list", ast.Load()), [numbers], []), node)
    return None


def body_with(method: ast.FunctionDef, call: ast.Call) -> list[ast.stmt] | None:
    """Return a method's statements with the arguments of a call for its parameters; None where they
    cannot be told, or where it assigns these.
    """
    function = deepcopy(method)
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

"""Loop bodies with `continue`, functions that give nothing with an early `return`, constructors with
any, and functions that do nothing but choose what to give, written without.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.codegen.translate.language.trees.syntax import Untranslatable, if_statement


def without_continue(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return a loop's statements with what follows `if test: continue` under the opposite test.

    A `continue` that is not the end of one side of a condition stays.
    """
    for index, statement in enumerate(body):
        after = list(body[index + 1 :])
        match statement:
            case ast.Continue():
                return list(body[:index])
            case ast.If(test=test, body=inside, orelse=other) if _skips(inside):
                kept = ast.If(
                    test,
                    without_continue(inside) or [ast.Pass()],
                    without_continue([*other, *after]),
                )
            case ast.If(test=test, body=inside, orelse=other) if _skips(other):
                kept = ast.If(test, without_continue([*inside, *after]), without_continue(other))
            case _:
                continue
        return [*body[:index], ast.copy_location(kept, statement)]
    return list(body)


def _skips(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Continue)


def without_returns(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a constructor, behind whose last one others may be put: what follows a
    condition that may return stands on the sides that do not.

    Raises:
        Untranslatable: a loop returns.
    """
    for index, statement in enumerate(body):
        if not _returns(statement):
            continue
        before, after = list(body[:index]), body[index + 1 :]
        match statement:
            case ast.Return():
                return before
            case ast.If(test=test, body=inside, orelse=other):
                sides = [without_returns([*side, *deepcopy(after)]) for side in (inside, other)]
                return [*before, *([if_statement(test, *sides)] if any(sides) else [])]
        raise Untranslatable("a constructor whose loop returns")
    return list(body)


def _returns(statement: ast.AST) -> bool:
    """Whether a statement may return from the function that it is in."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.expr):
        return False
    inside = ast.iter_child_nodes(statement)
    return isinstance(statement, ast.Return) or any(_returns(item) for item in inside)


def without_early_returns(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a function that gives nothing with what follows `if test: return` under
    the opposite test; others as they are.
    """
    inside = [item for statement in body for item in ast.walk(statement)]
    returns = [item for item in inside if isinstance(item, ast.Return)]
    loops = any(
        isinstance(item, ast.For | ast.While | ast.FunctionDef | ast.Lambda) for item in inside
    )
    if not returns or loops or any(item.value is not None for item in returns):
        return list(body)
    for index, statement in enumerate(body):
        after = list(body[index + 1 :])
        match statement:
            case ast.If(test=test, body=[ast.Return()], orelse=[]) if after:
                other = ast.UnaryOp(ast.Not(), test)
                rest = ast.If(other, without_early_returns(after), [])
                return [
                    *body[:index],
                    ast.fix_missing_locations(ast.copy_location(rest, statement)),
                ]
    return list(body)


def chosen(body: Sequence[ast.stmt]) -> ast.expr | None:
    """Return what a function gives that tests, and returns, and does nothing else, as one expression;
    None for others.
    """
    match body:
        case [ast.Expr(value=ast.Constant()), *after]:
            return chosen(after)
        case [ast.Return(value=ast.expr() as value), *_]:
            return value
        case [ast.If(test=test, body=inside, orelse=other), *after]:
            one, two = chosen([*inside, *after]), chosen([*other, *after])
            if one is not None and two is not None:
                return ast.copy_location(ast.IfExp(test, one, two), test)
    return None

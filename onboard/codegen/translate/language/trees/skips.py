"""Loop bodies with `continue`, functions that give nothing with an early `return`, and those that do
nothing but choose what to give, written without.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from copy import deepcopy

from onboard.codegen.translate.language.trees.syntax import if_statement


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
    """Return the statements of a function that gives nothing, behind whose last one others may be put:
    what follows a condition that may return stands on the sides that do not. Others, and those whose
    loops return, are as they are.
    """
    inside = [item for statement in body for item in _inside(statement)]
    loops = [item for item in inside if isinstance(item, ast.For | ast.While | ast.With | ast.Try)]
    if any(isinstance(item, ast.Return) and item.value is not None for item in inside) or any(
        map(returns, loops)
    ):
        return list(body)
    return _to_the_end(body)


def _to_the_end(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    for index, statement in enumerate(body):
        before, after = list(body[:index]), body[index + 1 :]
        match statement:
            case ast.Return():
                return before
            case ast.If(test=test, body=inside, orelse=other) if returns(statement):
                sides = [_to_the_end([*side, *deepcopy(after)]) for side in (inside, other)]
                kept = [if_statement(test, *sides)] if any(sides) else []
                return [*before, *(ast.copy_location(item, statement) for item in kept)]
    return list(body)


def returns(statement: ast.AST) -> bool:
    """Whether a statement may return from the function that it is in."""
    return any(isinstance(item, ast.Return) for item in _inside(statement))


def leaves(statement: ast.AST) -> bool:
    """Whether a statement of a loop may end its turn early: `break`, `continue` or `return`."""
    if isinstance(statement, ast.For | ast.While):
        return returns(statement)
    inside = [] if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.expr) else [statement]
    return any(
        isinstance(each, ast.Break | ast.Continue | ast.Return)
        or any(map(leaves, ast.iter_child_nodes(each)))
        for each in inside
    )


def _inside(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement and those in it that are the same function's."""
    yield statement
    if not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.expr):
        for item in ast.iter_child_nodes(statement):
            yield from _inside(item)


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

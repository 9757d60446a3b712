"""What the text of a loop says of its turns and its variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def is_guarded(node: ast.For) -> bool:
    """Whether some turns may be unlike those that a probe has seen: an `if` that compares the
    counter with more than its first value or the range's end, or a `break`.
    """
    tests = [each.test for each in ast.walk(node) if isinstance(each, ast.If | ast.IfExp)]
    leaves = any(isinstance(each, ast.Break | ast.While) for each in ast.walk(node))
    return leaves or any(_asks_where(test, _names(node.target)) for test in tests)


def _asks_where(test: ast.expr, counters: set[str]) -> bool:
    """Whether a test asks for a turn other than the first or the last."""
    if not counters & _names(test):
        return False
    return not all(map(_is_of_ends, ast.walk(test)))


def _is_of_ends(node: ast.AST) -> bool:
    """Whether a part of a test is one that the first and the last turn are told by."""
    match node:
        case ast.Constant(value=value):
            return value in (0, 1)
        case ast.BinOp(op=ast.Add() | ast.Sub()) | ast.Compare() | ast.BoolOp() | ast.UnaryOp():
            return True
        case ast.Name() | ast.expr_context() | ast.operator() | ast.cmpop() | ast.boolop():
            return True
        case ast.unaryop():
            return True
    return False


def read_in(node: ast.For) -> set[str]:
    """Return the variables that a loop reads, `x` and `self.x`: more than where it sets their items
    or appends to them.
    """
    grown = [id(owner) for owner in _filled(node)]
    return {
        ast.unparse(each)
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
        and isinstance(each.ctx, ast.Load)
        and id(each) not in grown
    }


def filled_in(node: ast.For) -> set[str]:
    """Return the variables whose items a loop sets, or to which it appends."""
    return {ast.unparse(owner) for owner in _filled(node)}


def _filled(node: ast.For) -> Iterator[ast.expr]:
    for each in ast.walk(node):
        match each:
            case ast.Subscript(value=owner, ctx=ast.Store()):
                yield owner
            case ast.Attribute(value=owner, attr="append"):
                yield owner


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}

"""How many lines statements will take, once they are formatted."""

from __future__ import annotations

import ast
from collections.abc import Sequence

LINE_LENGTH = 100
"""Columns of generated code, and of this project's own."""
_INDENT = 4
BODY = 2 * _INDENT
"""Columns in front of the statements of a method."""


def lines_of(body: Sequence[ast.stmt], indent: int = BODY) -> int:
    """Return about how many lines statements take when they are formatted."""
    return sum(_lines_of(statement, indent) for statement in body)


def _lines_of(statement: ast.stmt, indent: int) -> int:
    match statement:
        case ast.If(body=body, orelse=orelse):
            sides = lines_of(body, indent + _INDENT) + lines_of(orelse, indent + _INDENT)
            return 1 + bool(orelse) + sides
        case ast.For(body=body) | ast.While(body=body):
            return 1 + lines_of(body, indent + _INDENT)
        case ast.Assign(targets=[target], value=value):
            return _wrapped(value, indent, len(ast.unparse(target)) + len(" = "))
        case ast.Return(value=ast.expr() as value):
            return _wrapped(value, indent, len("return "))
    return 1


def _wrapped(value: ast.expr, indent: int, before: int = 0) -> int:
    """Return how many lines an expression takes, with `before` columns of text in front of it."""
    if indent + before + len(ast.unparse(value)) <= LINE_LENGTH:
        return 1
    items: list[ast.expr | ast.keyword]
    match value:
        case ast.Call(args=args, keywords=keywords):
            items = [*args, *keywords]
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            items = [*elements]
        case _:
            return 3
    inside = indent + _INDENT
    if inside + sum(len(ast.unparse(item)) + len(", ") for item in items) - 2 <= LINE_LENGTH:
        return 3
    return 2 + sum(_item_lines(item, inside) for item in items)


def _item_lines(item: ast.expr | ast.keyword, indent: int) -> int:
    if isinstance(item, ast.keyword):
        return _wrapped(item.value, indent, len(f"{item.arg}=,"))
    return _wrapped(item, indent, len(","))

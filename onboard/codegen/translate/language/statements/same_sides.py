"""Sides of a condition that compute the same, one perhaps by way of variables that the other has not."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass

from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.expressions.decisions import WrittenOut
from onboard.codegen.translate.language.values import Unread


def of_either_side(
    sides: tuple[list[ast.stmt], list[ast.stmt]],
    behind: Sequence[ast.stmt],
    before: Env,
    joined: Env,
) -> list[ast.stmt] | None:
    """Return statements that stand for both sides; None where they are not the same.

    Variables that one side alone assigns to are new ones, or statements `behind` assign to them
    first; nothing reads them, which `joined`, what is known there, has then.
    """
    body, orelse = sides
    if [ast.dump(item) for item in body] == [ast.dump(item) for item in orelse]:
        return body  # what differed (masks, caches) is not there
    one, other = (_values(side) for side in (body, orelse))
    if one is None or other is None or not (both := one.keys() & other.keys()):
        return None
    if any(ast.dump(one[key]) != ast.dump(other[key]) for key in both):
        return None
    alone = one.keys() ^ other.keys()
    if not all(_is_made_anew(key, behind, key in before.values) for key in alone):
        return None
    if any(_reads(value, alone) for key, value in joined.values.items() if key not in alone):
        return None
    for key in alone:
        joined.values[key] = Unread(f"{key}, which one side of a condition leaves")
    return min(body, orelse, key=len)


def _is_made_anew(key: str, behind: Sequence[ast.stmt], is_known: bool) -> bool:
    """Whether the first statement with a variable assigns to it; one that is new may be in none."""
    for statement in behind:
        names = [x for x in ast.walk(statement) if isinstance(x, ast.Name) and x.id == key]
        if names:
            return isinstance(statement, ast.Assign) and statement.targets == names
    return not is_known


def _values(statements: Sequence[ast.stmt]) -> dict[str, ast.expr] | None:
    """Return what statements leave in variables, of what these were before; None where they do more
    than assign.
    """
    values: dict[str, ast.expr] = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=key)], value=value):
                values[key] = _Once(values).visit(deepcopy(value))
            case _:
                return None
    return values


class _Once(WrittenOut):
    """Writes values in the place of variables; they are of what these were before, as they are."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Write its value."""
        return self.values.get(node.id, node)


def _reads(value: object, names: Collection[str]) -> bool:
    """Whether what is known of a variable is code that reads another one."""
    match value:
        case ast.AST():
            nodes = ast.walk(value)
            return any(isinstance(node, ast.Name) and node.id in names for node in nodes)
        case dict():
            return any(_reads(item, names) for item in value.values())
        case list() | tuple():
            return any(_reads(item, names) for item in value)
    if not is_dataclass(value):
        return False
    return any(_reads(getattr(value, each.name), names) for each in fields(value))

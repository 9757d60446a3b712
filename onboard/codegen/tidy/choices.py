"""Modules that are made under one condition, made under one `if`."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from copy import deepcopy

from onboard.codegen.translate.language.trees.cleanup import negated


def with_joined_choices(body: Sequence[ast.stmt], called: Collection[str]) -> list[ast.stmt]:
    """Return statements with `if test: ... else: ...` for neighbours that are `self.a = x if test
    else None`.

    `called`: attributes that code calls, or asks for weights, and reads in no other way, so that it
    does not matter whether they are None or not there; `body` stays as it is.
    """
    out: list[ast.stmt] = []
    for statement in map(deepcopy, body):
        choice = _choice(statement, called)
        if choice is None:
            out.append(statement)
        elif not (out and isinstance(out[-1], _Choice) and _add(out[-1], choice)):
            out.append(choice)
    return [_plain(item) for item in out]


class _Choice(ast.If):
    """Statements of one condition, and what they were."""

    written: list[ast.stmt]


def _choice(statement: ast.stmt, called: Collection[str]) -> _Choice | None:
    """Return `self.a = x if test else None` as a condition; None for anything else."""
    match statement:
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr) as target],
            value=ast.IfExp(test=test, body=body, orelse=orelse),
        ) if attr in called:
            sides: list[list[ast.stmt]] = [
                []
                if _is_none(value)
                else [ast.copy_location(ast.Assign([target], value), statement)]
                for value in (body, orelse)
            ]
        case _:
            return None
    if not sides[0]:
        test, sides = negated(test), sides[::-1]
    choice = _Choice(test, sides[0], sides[1])
    choice.written = [statement]
    return ast.copy_location(choice, statement)


def _add(choice: _Choice, other: _Choice) -> bool:
    """Add the statements of a condition to one before it that is the same, or its opposite."""
    if ast.unparse(other.test) == ast.unparse(choice.test):
        sides = other.body, other.orelse
    elif ast.unparse(negated(other.test)) == ast.unparse(choice.test):
        sides = other.orelse, other.body
    else:
        return False
    choice.body += sides[0]
    choice.orelse += sides[1]
    choice.written += other.written
    return True


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _plain(statement: ast.stmt) -> ast.stmt:
    """Return a statement as it was where it is alone with its condition."""
    if not isinstance(statement, _Choice):
        return statement
    if len(statement.written) == 1:
        return statement.written[0]
    return ast.copy_location(ast.If(statement.test, statement.body, statement.orelse), statement)


def only_called(trees: Sequence[ast.AST]) -> set[str]:
    """Return the attributes that code calls, or takes an attribute of, and reads in no other
    way.
    """
    called: set[str] = set()
    others: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
                    (called if _asks(node, child) else others).add(child.attr)
    return called - others


def _asks(node: ast.AST, child: ast.Attribute) -> bool:
    """Whether a node calls its child, or takes an attribute of it."""
    return isinstance(node, ast.Attribute) or (isinstance(node, ast.Call) and node.func is child)

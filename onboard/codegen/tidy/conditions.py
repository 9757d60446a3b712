"""Conditions that say no more than they have to: without parentheses inside, without two sides that
do the same, with what alone differs between two sides.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.codegen.tidy.lines import lines_of
from onboard.codegen.translate.language.trees.cleanup import changed
from onboard.ops.library import NAMESPACE, op_sources

_OPS = f"torch.ops.{NAMESPACE}"
_RANK = 4
"""Dimensions of what attention gives: those of a batch, of a sequence, heads and channels."""
_LONG = 6
"""Lines of two sides that are worth a name for what differs."""


def flat(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements whose conditions hold no conditions of the same kind; `body` stays as it
    is.
    """
    return [_Flat().visit(deepcopy(statement)) for statement in body]


class _Flat(ast.NodeTransformer):
    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        parts = [
            value.values
            if isinstance(value, ast.BoolOp) and type(value.op) is type(node.op)
            else [value]
            for value in node.values
        ]
        return ast.copy_location(
            ast.BoolOp(node.op, [item for part in parts for item in part]), node
        )


def with_known_ranks(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements with the side alone that is taken for as many dimensions as attention gives,
    `if len(x.shape) == 5`; `body` stays as it is.
    """
    out: list[ast.stmt] = []
    attended: set[str] = set()
    for statement in map(deepcopy, body):
        match statement:
            case ast.If(
                test=ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=rank)])
            ) if _asked(statement.test) in attended:
                out += statement.body if rank == _RANK else statement.orelse
            case _:
                out.append(statement)
        attended -= changed(statement)
        match statement:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value) if _attends(value):
                attended.add(variable)
    return out


def _asked(test: ast.expr) -> str:
    """Return x of `len(x.shape) == n`, "" for anything else."""
    match test:
        case ast.Compare(
            left=ast.Call(
                func=ast.Name(id="len"),
                args=[ast.Attribute(value=ast.Name(id=variable), attr="shape")],
            )
        ):
            return variable
    return ""


def _attends(value: ast.expr) -> bool:
    function = _op(value)
    return isinstance(function, ast.Attribute) and op_sources()[function.attr].attends


def with_chosen_ops(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements in which an op is chosen, and called once, where two sides of a condition
    call one each with the same arguments, and a side alone where both are the same; `body` stays
    as it is.
    """
    out: list[ast.stmt] = []
    for statement in map(deepcopy, body):
        match statement:
            case ast.If(test=test, body=[ast.Assign() as one], orelse=[ast.Assign() as other]):
                chosen = _one_call(test, one, other, body)
                placed = [ast.copy_location(item, statement) for item in chosen or [statement]]
                out += map(ast.fix_missing_locations, placed)
            case _:
                out.append(statement)
    return out


def _one_call(
    test: ast.expr, one: ast.Assign, other: ast.Assign, body: Sequence[ast.stmt]
) -> list[ast.stmt] | None:
    """Return what two sides of a condition do without repeating it; None where they differ."""
    if ast.dump(one) == ast.dump(other):
        return [one]
    ops = [_op(side.value) for side in (one, other)]
    match ops:
        case [ast.Attribute() as first, ast.Attribute() as second]:
            variable = _common(first.attr, second.attr)
        case _:
            return None
    taken = {node.id for item in body for node in ast.walk(item) if isinstance(node, ast.Name)}
    sides = [_called(deepcopy(side), variable) for side in (one, other)]
    if ast.dump(sides[0]) != ast.dump(sides[1]) or variable in taken:
        return None
    if lines_of([one, other]) < _LONG:
        return None
    place = ast.Name(variable, ast.Store())
    return [
        ast.Assign([place], second),
        ast.If(test, [ast.Assign([place], first)], []),
        sides[0],
    ]


def _op(value: ast.expr) -> ast.expr | None:
    """Return the op that a value calls; None where it does not."""
    match value:
        case ast.Call(func=ast.Attribute(value=owner) as function) if ast.unparse(owner) == _OPS:
            return function
    return None


def _called(side: ast.Assign, variable: str) -> ast.Assign:
    assert isinstance(side.value, ast.Call)
    side.value.func = ast.Name(variable, ast.Load())
    return side


def _common(one: str, other: str) -> str:
    """Return what two ops have in common: `rope` of `torch_rope_with_a` and `torch_rope_with_b`."""
    words = other.split("_")[1:]
    return next((word for word in one.split("_")[1:] if word in words), "op")

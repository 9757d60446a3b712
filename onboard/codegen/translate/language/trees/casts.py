"""Casts to float32 that nothing sees, since each of their readers casts back.

Modeling code computes attention's scores in float32, so casts queries and keys before it multiplies
them. The canonical op does that itself and wants tensors of one dtype.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

_SIZES = {"size", "shape", "dim", "ndim"}


def cast_to_float32(expr: ast.expr) -> ast.expr | None:
    """Return `x` of `x.float()` or `x.to(torch.float32)`; None for anything else."""
    match expr:
        case ast.Call(func=ast.Attribute(value=inner, attr="float"), args=[], keywords=[]):
            return inner
        case ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[dtype], keywords=[]):
            return inner if ast.unparse(dtype) == "torch.float32" else None
    return None


def without_unseen(body: Sequence[ast.stmt], live_out: frozenset[str]) -> list[ast.stmt]:
    """Return statements without casts of a variable whose readers all cast it again, or read its
    shape alone.
    """
    kept = []
    for index, statement in enumerate(body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value):
                inner = cast_to_float32(value)
                if (
                    inner is not None
                    and variable not in live_out
                    and _is_unseen(variable, body[index + 1 :])
                ):
                    statement = ast.copy_location(ast.Assign(statement.targets, inner), statement)
        kept.append(statement)
    return kept


def _is_unseen(variable: str, after: Sequence[ast.stmt]) -> bool:
    """Whether statements read no more of a variable than its shape and what its value is in another
    dtype.
    """
    nodes = [node for statement in after for node in ast.walk(statement)]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == variable]
    allowed = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in {*_SIZES, "type_as"}
    ]
    return {id(node) for node in uses} <= {id(node.value) for node in allowed}


_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "contiguous"}


def without_casts(expr: ast.expr) -> ast.expr:
    """Return x of `x.to(...).type_as(...)`."""
    match expr:
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in _CASTS:
            return without_casts(inner)
    return expr


def casts_alone(node: ast.If) -> bool:
    """Whether a branch is `if x.dtype != y.dtype: x = x.type_as(y)`, or alike with devices."""
    tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    return not node.orelse and all(map(_is_of_kind, tests)) and all(map(_casts, node.body))


def _is_of_kind(test: ast.expr) -> bool:
    """Whether a test is that two tensors lie elsewhere, or have other dtypes."""
    match test:
        case ast.Compare(
            left=ast.Attribute(attr="dtype" | "device" as one),
            ops=[ast.NotEq()],
            comparators=[ast.Attribute(attr="dtype" | "device" as other)],
        ):
            return one == other
    return False


def _casts(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(targets=[target], value=ast.Call() as value):
            return ast.unparse(without_casts(value)) == ast.unparse(target)
    return False


def is_gpu(node: ast.expr) -> bool:
    """Whether code is the name of a GPU, or a device of that name."""
    match node:
        case ast.Constant(value=str(name)):
            return name.partition(":")[0] == "cuda"
        case ast.Call(func=ast.Attribute(attr="device"), args=[name, *_]):
            return is_gpu(name)
    return False

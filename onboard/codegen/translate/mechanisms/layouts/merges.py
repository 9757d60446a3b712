"""Changes of shape that take dimensions apart or merge them: which axes each of the new ones is."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees.syntax import attribute, call, constant
from onboard.codegen.translate.language.values import Code, Known, Value
from onboard.codegen.translate.mechanisms.layouts.laid import Laid, folded, laid

SHAPES = ("view", "reshape")


def fold(owner: Code, attr: str, args: Args) -> Code | None:
    """Return `x.view(batch * heads, sequence, dim)`, or `x.view(sequence, batch * heads, dim)`, of a
    tensor that lies as it is seen; or `x.view(batch, heads, sequence, dim)` of one that has that
    shape.
    """
    if attr == "flatten" and owner.transposed and ints(args.positional) == [0, 1]:
        return folded(owner.expr, by_sequence=True)
    if attr not in SHAPES or args.keywords or args.stars or owner.static:
        return None
    match args.positional:
        case [Code(expr=ast.BinOp(left=batch, op=ast.Mult(), right=heads), static=False), *rest]:
            if len(rest) != 2:
                return None
            if owner.transposed:
                return folded(owner.expr, by_sequence=True)
            sizes = [batch, heads, *(size.code() for size in rest)]
            return folded(call(attribute(owner.expr, attr), *sizes), by_sequence=False)
        case [
            first,
            Code(expr=ast.BinOp(left=batch, op=ast.Mult(), right=heads), static=False),
            last,
        ] if not owner.transposed:
            sizes = [first.code(), batch, heads, last.code()]
            whole = call(attribute(owner.expr, attr), *sizes)
            return Laid(whole, form=owner.form, dims=((0,), (1, 2), (3,)), axes=4)
        case [_, heads, Code(static=False, expr=length), _] if (
            owner.transposed and not heads.equals(Known(1))
        ):
            # [batch, heads, sequence, dim], as it is
            return None if isinstance(length, ast.BinOp) else owner
    return None


def reshaped(owner: Laid, sizes: Sequence[Value], frame: Frame) -> Code | None:
    """Return `owner.view(sizes)`; None where it cannot be told which axes the new dimensions are.

    A size that is a product of several at run time is that of as many axes. Where there are too few
    sizes, -1 or the last one has what is left; where there is one too many, the last axis is taken
    apart.
    """
    if not all(owner.dims) or owner.is_rows:
        return None
    counts = [_factors(size, frame) for size in sizes]
    missing = len(owner.seen) - sum(counts)
    if missing == -1 and len(owner.dims[-1]) == 1 and len(sizes) > 1:
        owner, missing = _last_apart(owner, sizes[-2]), 0
    if missing < 0:
        return None
    if missing:
        open_ended = [place for place, size in enumerate(sizes) if size.equals(Known(-1))]
        counts[open_ended[0] if open_ended else -1] += missing
    seen, dims = owner.seen, []
    for count in counts:
        dims.append(tuple(seen[:count]))
        seen = seen[count:]
    return laid(owner.expr, dims, owner.axes, owner)


def _last_apart(owner: Laid, size: Value) -> Laid:
    """Return it with its last axis as two, the first of which has a size, or the last factor of
    one.
    """
    code = size.code()
    first = code.right if isinstance(code, ast.BinOp) and not size.is_static else code
    axis = owner.seen[-1]
    parts = ast.Tuple([deepcopy(first), constant(-1)], ast.Load())
    expr = call(attribute(owner.expr, "unflatten"), constant(axis), parts)
    dims = [tuple(each + (each > axis) for each in group) for group in owner.dims]
    return Laid(expr, form=owner.form, dims=(*dims, (axis + 1,)), axes=owner.axes + 1)


def _factors(size: Value, frame: Frame) -> int:
    """Return how many sizes at run time a size is the product of."""
    if size.is_static or not isinstance(size, Code):
        return 1
    return _leaves(WrittenOut(local_values(frame)).visit(deepcopy(size.expr)))


def _leaves(expr: ast.expr) -> int:
    match expr:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _leaves(left) + _leaves(right)
    return 1


def merged(owner: Laid, first: int, last: int) -> Code:
    """Return `owner.flatten(first, last)`."""
    rank = len(owner.dims)
    start, stop = first % rank, last % rank + 1
    group = tuple(axis for each in owner.dims[start:stop] for axis in each)
    return laid(owner.expr, [*owner.dims[:start], group, *owner.dims[stop:]], owner.axes, owner)


def ints(values: Sequence[Value]) -> list[int]:
    """Return the constants among values that are numbers."""
    found = [value.value for value in values if isinstance(value, Known)]
    return [value for value in found if type(value) is int]

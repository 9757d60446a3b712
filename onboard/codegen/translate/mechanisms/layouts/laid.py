"""Tensors whose dimensions code swaps and merges, as attention by `bmm` has batch and heads in one,
and Megatron the sequence before the batch: what they are made of is kept, how it is seen is noted.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from onboard.codegen.translate.language.forms import ROWS
from onboard.codegen.translate.language.trees.syntax import attribute, call, constant
from onboard.codegen.translate.language.values import Code, Items, Known, Value, untransposed

Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Laid(Code):
    """A tensor that code sees in another shape than `expr` has."""

    dims: Dims = ()
    """Of each dimension that code sees, the axes of `expr` that are merged in it; one without any
    has size one.
    """
    axes: int = 0
    """How many axes `expr` has. Of rows of a table the first one is the batch, which code does not
    see: they are the same for all texts.
    """
    typed = True
    returned = True

    @property
    def annotation(self) -> str | None:  # type: ignore[override]
        """How a signature says that heads are apart, behind the sequence."""
        return "FoldedHeads" if self.dims == ((0, 2), (1,), (3,)) else None

    @property
    def seen(self) -> list[int]:
        """The axes in the order in which code sees them."""
        return [axis for group in self.dims for axis in group]

    @property
    def is_rows(self) -> bool:
        """Whether it is rows of a table."""
        return 0 not in self.seen

    def code(self) -> ast.expr:
        """Return the tensor as code sees it; rows have the batch in front."""
        hidden = [(0,)] if self.is_rows else []
        groups = [*hidden, *self.dims]
        seen = [axis for group in groups for axis in group]
        expr, end = permuted(self.expr, seen), len(seen)
        for group in reversed(groups):
            if len(group) > 1:
                first, last = constant(end - len(group)), constant(end - 1)
                expr = call(attribute(expr, "flatten"), first, last)
            end -= len(group)
        return with_ones(expr, [bool(group) for group in groups])

    def as_seen(self) -> Code:
        """Return the tensor as code sees it, but for rows and heads that a signature tells of."""
        return self if self.is_rows or self.annotation else Code(self.code(), form=self.form)

    def same_as(self, other: Laid) -> bool:
        """Whether both are seen alike."""
        return super().same_as(other) and self.same_fact(other)

    def same_fact(self, other: Value) -> bool:
        """Whether both are seen alike."""
        return isinstance(other, Laid) and (self.dims, self.axes) == (other.dims, other.axes)

    def joined(self, other: Value) -> Value:
        """Return what holds for both: axes that lie as they are seen, where as many are merged."""
        if not isinstance(other, Laid) or as_other(self, other) is None:
            return super().joined(other)
        hidden = int(self.is_rows)
        places = iter(range(hidden, self.axes))
        dims = tuple(tuple(next(places) for _ in group) for group in self.dims)
        return Laid(self.expr, dims=dims, axes=self.axes)

    def passed(self, fact: Value | None) -> ast.expr:
        """Return the expression for a function that was translated for a layout."""
        lies = as_other(self, fact) if isinstance(fact, Laid) else None
        return self.code() if lies is None else lies

    def sizes(self) -> Items:
        """Return the size of each dimension that code sees."""
        return Items(tuple(self._size(group) for group in self.dims))

    def _size(self, group: tuple[int, ...]) -> Value:
        sizes = [
            ast.Subscript(attribute(self.expr, "shape"), constant(axis), ast.Load())
            for axis in group
        ]
        whole: ast.expr | None = None
        for size in sizes:
            whole = size if whole is None else ast.BinOp(whole, ast.Mult(), size)
        return Known(1) if whole is None else Code(whole)


def laid(expr: ast.expr, dims: Sequence[tuple[int, ...]], axes: int, like: Code) -> Code:
    """Return a tensor that is seen so; one that is seen as it lies is nothing special."""
    seen = tuple(dims)
    if seen == tuple((axis,) for axis in range(axes)):
        return Code(expr, form=like.form)
    if seen in (((0,), (2,), (1,)), ((0,), (2,), (1,), (3,))):
        return Code(expr, form=like.form, transposed=True)
    return Laid(expr, form=like.form, dims=seen, axes=axes)


def moved(owner: Laid, order: Sequence[int]) -> Code:
    """Return a tensor whose dimensions are seen in another order."""
    return laid(owner.expr, [owner.dims[place] for place in order], owner.axes, owner)


def reordered(value: Code, axes: str, wanted: str) -> Code:
    """Return a tensor whose dimensions have names with these in another order."""
    if not isinstance(value, Laid):
        order = list(range(len(axes)))
        if value.transposed:
            order[1], order[2] = 2, 1
        lies = untransposed(value) if type(value) is Code else Code(value.code())
        dims = tuple((axis,) for axis in order)
        value = Laid(lies.code(), form=value.form, dims=dims, axes=len(axes))
    return moved(value, [axes.index(axis) for axis in wanted])


def as_other(value: Laid, other: Laid) -> ast.expr | None:
    """Return a tensor with its axes in the order in which those of another lie, that is seen alike;
    None where it is not.
    """
    groups = [[len(group) for group in each.dims] for each in (value, other)]
    if groups[0] != groups[1] or value.axes != other.axes or value.is_rows != other.is_rows:
        return None
    places = dict(zip(other.seen, value.seen, strict=True))
    return permuted(value.expr, [places.get(axis, axis) for axis in range(other.axes)])


def last_in_place(value: Laid) -> Laid:
    """Return a tensor whose last axis is the last dimension that code sees, one axis."""
    (last,) = value.dims[-1]
    order = [*(axis for axis in range(value.axes) if axis != last), last]
    dims = tuple(tuple(order.index(axis) for axis in group) for group in value.dims)
    return Laid(permuted(value.expr, order), form=value.form, dims=dims, axes=value.axes)


def rows(value: Value) -> Laid | None:
    """Return rows of a table, [sequence, dim] as code sees them; None for anything else."""
    if isinstance(value, Laid):
        return value if value.is_rows else None
    if isinstance(value, Code) and value.form == ROWS and not value.transposed:
        return Laid(value.expr, dims=((1,), (2,)), axes=3)
    return None


def heads_first(value: Code, rank: int) -> Code | None:
    """Return [batch, heads, sequence, dim] of a tensor that is seen so, or as [batch * heads,
    sequence, dim]; `rank` is how many dimensions it is seen to have.
    """
    if not isinstance(value, Laid):
        return value if rank == 4 else None
    groups = [len(group) for group in value.dims]
    if value.axes != 4 or value.is_rows or groups not in ([2, 1, 1], [1, 1, 1, 1]):
        return None
    batch, heads, sequence, dim = value.seen
    if value.seen == [0, 1, 2, 3]:
        return Code(value.expr, form=value.form)
    turned = permuted(value.expr, [batch, sequence, heads, dim])
    return Code(turned, form=value.form, transposed=True)


def folded(expr: ast.expr, by_sequence: bool) -> Laid:
    """Return [batch, sequence, heads, dim], or [batch, heads, sequence, dim], as [batch * heads,
    sequence, dim].
    """
    dims: Dims = ((0, 2), (1,), (3,)) if by_sequence else ((0, 1), (2,), (3,))
    return Laid(expr, dims=dims, axes=4)


def aligned(table: Laid, other: Laid) -> ast.expr | None:
    """Return rows of a table with an axis for each that another tensor has, to be multiplied with
    it; None where code does not see which.
    """
    places: dict[int, int] = {}
    for own, others in zip(reversed(table.dims), reversed(other.dims), strict=False):
        if own and (len(own), len(others)) != (1, 1):
            return None
        places |= dict(zip(others, own, strict=True)) if own else {}
    # What is merged with the heads, or before these, are the texts
    rest = [axis for axis in other.seen if axis not in places]
    if not rest or len(table.dims) > len(other.dims) or len(places) != len(table.seen):
        return None
    places[rest[0]] = 0
    order = [places[axis] for axis in range(other.axes) if axis in places]
    return with_ones(permuted(table.expr, order), [axis in places for axis in range(other.axes)])


def permuted(expr: ast.expr, order: Sequence[int]) -> ast.expr:
    """Return `expr.permute(order)`."""
    swapped = [place for place, axis in enumerate(order) if place != axis]
    if not swapped:
        return expr
    if len(swapped) == 2:
        return call(attribute(expr, "transpose"), *map(constant, swapped))
    return call(attribute(expr, "permute"), *map(constant, order))


def with_ones(expr: ast.expr, there: Sequence[bool]) -> ast.expr:
    """Return a tensor with dimensions of size one where there is none."""
    if all(there):
        return expr
    if sum(there) == len(there) - 1:
        return call(attribute(expr, "unsqueeze"), constant([*there].index(False)))
    parts: list[ast.expr] = [ast.Slice() if each else ast.Constant(None) for each in there]
    while isinstance(parts[-1], ast.Slice):
        parts.pop()
    return ast.Subscript(expr, ast.Tuple(parts, ast.Load()), ast.Load())

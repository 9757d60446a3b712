"""Where the cut of a dimension is behind a reshape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from onboard.graph.sharding.cuts import Cut

Size = int | str
"""Of a dimension: a number, or the expression of a symbolic one."""
Group = tuple[range, range]
"""Dimensions before and behind a reshape that have the same entries."""


def sizes_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """Return the sizes of a (fake) tensor's dimensions; no symbolic one is given a value."""
    return tuple(size if type(size) is int else str(size) for size in tensor.shape)


def reshaped(
    dim: int, cut: Cut, before: Sequence[Size], behind: Sequence[Size]
) -> tuple[int, Cut] | None:
    """Return the dimension behind a reshape that has a dimension's cut, and its cut there; None
    where no single one has.
    """
    ins, outs = next(group for group in groups(before, behind) if dim in group[0])
    inner = _product(before[dim + 1 : ins.stop])
    if inner is None:
        return None
    flat = cut.refined(inner)
    found = ((out, _in_dimension(flat, behind[out], behind[out + 1 : outs.stop])) for out in outs)
    return next(((out, own) for out, own in found if own is not None and not own.is_whole), None)


def groups(before: Sequence[Size], behind: Sequence[Size]) -> Iterator[Group]:
    """Yield the groups of a reshape, the last dimensions first.

    Where sizes are symbolic and change, all dimensions from there to the front are one group.
    """
    left, right = len(before), len(behind)
    while left or right:
        taken = _closed(before[:left], behind[:right])
        yield range(taken[0], left), range(taken[1], right)
        left, right = taken


def _closed(before: Sequence[Size], behind: Sequence[Size]) -> tuple[int, int]:
    """Return where the shortest group begins that ends both."""
    left, right = len(before), len(behind)
    if left and right and before[-1] == behind[-1]:
        return left - 1, right - 1
    ins = outs = 1
    while left and right:
        if ins <= outs:
            left -= 1
            size, ins = before[left], ins * _number(before[left])
        else:
            right -= 1
            size, outs = behind[right], outs * _number(behind[right])
        if isinstance(size, str):
            return 0, 0
        if ins == outs > 1:
            return left, right
    return 0, 0


def _in_dimension(flat: Cut, size: Size, behind: Sequence[Size]) -> Cut | None:
    """Return the cut of one dimension of `size`, followed by others, of what lies flat; None where
    the others are cut, too, or a rank has none of what it cannot tell the number of.
    """
    if isinstance(size, str) and not all(map(len, flat.entries)):
        return None
    inner = _product(behind)
    if inner is None or (isinstance(size, str) and flat.size % inner):
        return None
    period = flat.size if isinstance(size, str) else size * inner
    longest = max(period, flat.size)
    if longest % period or longest % flat.size:
        return None
    whole = flat.repeated(longest // flat.size).in_blocks(inner)
    if whole is None:
        return None
    own = whole.part(0, period // inner)
    return own if own.repeated(longest // period).same_as(whole) else None


def _product(sizes: Sequence[Size]) -> int | None:
    return None if any(isinstance(size, str) for size in sizes) else prod(map(_number, sizes))


def _number(size: Size) -> int:
    return size if isinstance(size, int) else 1

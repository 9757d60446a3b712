"""`rearrange`, `repeat` and `einsum` of einops, for tensors: patterns of named axes, as its documentation
has them.
"""

from __future__ import annotations

import math
import re
import string

import torch

Axes = list[list[str]]
"""Of each dimension the names of the axes that it is made of."""


def rearrange(tensor: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """Return a tensor whose axes are split, permuted and joined as `pattern` says."""
    return repeat(tensor, pattern, **sizes)


def repeat(tensor: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """Return the same with axes on the right alone repeated `sizes` times."""
    left, right = axes_of(pattern, tensor.dim())
    found = _sizes(left, tensor.shape, sizes)
    wanted = [name for axis in right for name in axis]
    # A dimension of size one goes where the right has it not
    names = [name for axis in left for name in axis if name in wanted or found[name] != 1]
    split = tensor.reshape([found[name] for name in names])
    ordered = split.permute([names.index(name) for name in wanted if name in names])
    for place, name in enumerate(wanted):
        if name not in names:
            ordered = ordered.unsqueeze(place)
    spread = ordered.expand([found[name] for name in wanted])
    return spread.reshape([math.prod(found[name] for name in axis) for axis in right])


def einsum(*tensors_and_pattern: torch.Tensor | str) -> torch.Tensor:
    """Return the product of tensors whose axes the pattern names, summed over those that its right
    side lacks.
    """
    *tensors, pattern = tensors_and_pattern
    return torch.einsum(in_letters(str(pattern)), *tensors)


def in_letters(pattern: str) -> str:
    """Return a pattern of named axes as `torch.einsum` has it, a letter for each name."""
    names = dict.fromkeys(re.findall(r"\w+", pattern))
    letters = dict(zip(names, string.ascii_letters, strict=False))
    spelled = re.sub(r"\w+", lambda name: letters[name[0]], pattern)
    return re.sub(r"\s+", "", spelled)


def axes_of(pattern: str, dimensions: int) -> tuple[Axes, Axes]:
    """Return both sides of a pattern for a tensor of so many dimensions; an ellipsis is as many
    axes as are left.
    """
    left, right = (_parsed(side, number) for number, side in enumerate(pattern.split("->")))
    rest = [[f"...{index}"] for index in range(dimensions - len(left) + 1)]
    return _without_ellipsis(left, rest), _without_ellipsis(right, rest)


def _parsed(side: str, number: int) -> Axes:
    groups = re.findall(r"\(([^)]*)\)|(\S+)", side)
    axes = [inner.split() if not name else [name] for inner, name in groups]
    numbers = iter(range(len(side)))
    return [
        [f"{one}_{number}_{next(numbers)}" if one.isdigit() else one for one in axis]
        for axis in axes
    ]


def _without_ellipsis(axes: Axes, rest: Axes) -> Axes:
    at = next((place for place, axis in enumerate(axes) if axis in (["..."], ["…"])), None)
    if at is not None:
        return [*axes[:at], *rest, *axes[at + 1 :]]
    names = [name for axis in rest for name in axis]
    return [
        [each for name in axis for each in (names if name == "..." else [name])] for axis in axes
    ]


def _sizes(left: Axes, shape: torch.Size, given: dict[str, int]) -> dict[str, int]:
    """Return the size of each axis: given, or what is left of its dimension."""
    found = dict(given)
    for axis, size in zip(left, shape, strict=True):
        found |= {name: _as_number(name) for name in axis if name[0].isdigit()}
        open_names = [name for name in axis if name not in found]
        known = math.prod(found[name] for name in axis if name in found)
        for name in open_names:
            found[name] = size // known
        assert len(open_names) < 2
        assert math.prod(found[name] for name in axis) == size
    return _Sizes(found)


class _Sizes(dict[str, int]):
    def __missing__(self, name: str) -> int:
        assert name[0].isdigit(), f"no size is known of the axis {name}"
        return _as_number(name)


def _as_number(name: str) -> int:
    """Return the size of an axis that is written as a number."""
    return int(name.partition("_")[0])

"""What each axis of attention's operands stands for, as far as their sizes say.

Letters: B batch, T positions, H heads, D channels; K key heads and G the query heads of each, which
together are H; 1 an axis of one entry. An axis may be two of them, the first one outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

Role = tuple[str, ...]
Kind = tuple[str, int]
"""What an axis' size grows with (B, T or nothing), and how many times that it is."""


def kinds_of(
    shapes: Sequence[Sequence[int]], dims: Sequence[tuple[int, int]]
) -> tuple[Kind, ...] | None:
    """Return the kind of each axis of a tensor that has these shapes for `dims`, batches and lengths;
    None where sizes grow otherwise.
    """
    if len({len(shape) for shape in shapes}) != 1:
        return None
    kinds = [_kind(sizes, dims) for sizes in zip(*shapes, strict=True)]
    known = tuple(kind for kind in kinds if kind is not None)
    letters = [letter for letter, _ in known if letter]
    once = sorted(letters) == ["B", "T"]
    return known if len(known) == len(kinds) and once else None


def _kind(sizes: Sequence[int], dims: Sequence[tuple[int, int]]) -> Kind | None:
    if len(set(sizes)) == 1:
        return "", sizes[0]
    for index, letter in enumerate("BT"):
        ratios = {size / dim[index] for size, dim in zip(sizes, dims, strict=True)}
        if len(ratios) == 1 and (ratio := ratios.pop()).is_integer():
            return letter, int(ratio)
    return None


@dataclass(frozen=True)
class Axes:
    """The roles of a tensor's axes, and its numbers of heads and channels."""

    roles: tuple[Role, ...]
    heads: int
    channels: int
    key_heads: int | None = None
    """Where key heads and the query heads of each are axes of their own."""

    def split(self, key_heads: int, *, interleaved: bool = False) -> Axes:
        """Return the same with H written as K and G; interleaved: query head h has key head
        h % key_heads.
        """
        pair = ("G", "K") if interleaved else ("K", "G")
        roles = tuple(
            tuple(itertools.chain.from_iterable(pair if each == "H" else (each,) for each in role))
            for role in self.roles
        )
        return Axes(roles, self.heads, self.channels, key_heads)

    def letters(self) -> list[str]:
        """Return the letters of all axes but those of one entry, in their order."""
        return [each for role in self.roles for each in role if each != "1"]

    def sizes(self, batch: int, length: int) -> dict[str, int]:
        """Return each letter's size."""
        key_heads = self.key_heads or self.heads
        return {
            **{"B": batch, "T": length, "D": self.channels, "1": 1, "H": self.heads},
            **{"K": key_heads, "G": self.heads // key_heads},
        }


def readings(kinds: Sequence[Kind]) -> Iterator[Axes]:
    """Yield what the axes may be, the usual order of heads and channels first."""
    fixed = [index for index, (letter, _) in enumerate(kinds) if not letter]
    merged = [index for index, (letter, times) in enumerate(kinds) if letter and times > 1]
    wide = [index for index in fixed if kinds[index][1] > 1]
    for channels in sorted(fixed, reverse=True):
        others = [index for index in wide if index != channels]
        if len(others) + 2 * len(merged) > 2 or len(merged) > 1:
            continue
        for names in _head_letters(len(others)):
            letters = dict(zip(others, names, strict=True)) | {channels: "D"}
            for order in (1, -1) if merged else (1,):
                yield _axes(kinds, letters, order)


def _head_letters(count: int) -> tuple[str, ...]:
    return {0: ("",), 1: ("H",), 2: ("KG", "GK")}[count]


def _axes(kinds: Sequence[Kind], letters: Mapping[int, str], order: int) -> Axes:
    roles = [
        ((letter,) if times == 1 else (letter, "H")[::order])
        if letter
        else (letters.get(index, "1"),)
        for index, (letter, times) in enumerate(kinds)
    ]
    sizes = {name: kinds[index][1] for index, name in letters.items()}
    merged = prod(times for letter, times in kinds if letter)
    heads = merged * prod(size for name, size in sizes.items() if name != "D")
    return Axes(tuple(roles), heads, sizes["D"], sizes.get("K"))


def placed(tensor: Tensor, axes: Axes) -> Tensor:
    """Return a tensor [batch, heads, positions, channels] as `axes` (of K and G) say."""
    batch, _, length, _ = tensor.shape
    sizes = axes.sizes(batch, length)
    canonical = [each for each in "BKGTD" if each in axes.letters() or sizes[each] > 1]
    lying = tensor.reshape([sizes[each] for each in canonical])
    lying = lying.permute([canonical.index(each) for each in axes.letters()])
    return lying.reshape([prod(sizes[each] for each in role) for role in axes.roles]).clone()


def canonical_form(tensor: Tensor, axes: Axes, batch: int, length: int) -> Tensor:
    """Return a tensor that lies as `axes` (of K and G) say as [batch, heads, positions,
    channels].
    """
    sizes = axes.sizes(batch, length)
    letters = axes.letters()
    apart = tensor.reshape([sizes[each] for each in letters])
    order = [each for each in "BKGTD" if each in letters]
    apart = apart.permute([letters.index(each) for each in order])
    return apart.reshape(batch, axes.heads, length, axes.channels)

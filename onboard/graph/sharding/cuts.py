"""Which entries of a tensor's dimensions each rank has.

A cut names the entries, rank by rank. So contiguous shares, heads of fused and interleaved
projections, and key heads that several ranks have all take the same form, and what an op does to
a dimension (cutting, joining, reshaping it) is done to the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Entries = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Cut:
    """The entries of a dimension that each rank has, of `size`; a dimension of several times that
    size has them in each of its blocks.
    """

    size: int
    entries: tuple[Entries, ...]
    """By rank, in the order in which they lie in the rank's tensor."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank has everything, in order."""
        return all(len(own) == self.size and _is_run(own, 0) for own in self.entries)

    def same_as(self, other: Cut | None) -> bool:
        """Whether another cut gives every rank the same."""
        if self is other:
            return True
        return (
            other is not None
            and self.size == other.size
            and all(map(np.array_equal, self.entries, other.entries))
        )

    def refined(self, times: int) -> Cut:
        """Return the cut of a dimension in which `times` entries stand for each of this one's."""
        return (
            self if times == 1 else self._each(self.size * times, lambda own: _blocks(own, times))
        )

    def in_blocks(self, length: int) -> Cut | None:
        """Return the cut of a dimension whose entries are this one's blocks of `length`; None where
        a rank has a part of a block.
        """
        if length == 1:
            return self
        if self.size % length or any(len(own) % length for own in self.entries):
            return None
        coarse = self._each(self.size // length, lambda own: own[::length] // length)
        return coarse if coarse.refined(length).same_as(self) else None

    def shared_by(self, times: int) -> Cut | None:
        """Return the cut of a dimension of which each entry serves `times` of this one's in a row,
        as a key head serves query heads.

        All ranks have as many of them, each of which serves as many in a row: where a rank's would
        serve unevenly, it has some more than once, as query heads 2 and 3 of six, which two key
        heads serve. None where ranks have different numbers of entries.
        """
        if self.size % times or len({len(own) for own in self.entries}) > 1:
            return None
        serving = [own // times for own in self.entries]
        alike = _served_alike(serving)
        return self._each(self.size // times, lambda own: (own // times)[::alike])

    def repeated(self, times: int) -> Cut:
        """Return the cut of `times` such dimensions, one after the other."""
        if times == 1:
            return self
        starts = np.arange(times) * self.size
        return self._each(
            self.size * times, lambda own: (starts[:, None] + own[None, :]).reshape(-1)
        )

    @property
    def left_out(self) -> Entries:
        """The entries that no rank has."""
        missing = np.ones(self.size, dtype=bool)
        for own in self.entries:
            missing[own] = False
        return np.flatnonzero(missing)

    def completed(self) -> Cut:
        """Return the cut with which every rank also has what no rank has by this one."""
        rest = self.left_out
        return self if not len(rest) else self._each(self.size, lambda own: np.union1d(own, rest))

    def part(self, start: int, stop: int, step: int = 1) -> Cut:
        """Return the cut of the entries from `start` to `stop`."""
        wanted = range(start, min(stop, self.size), step)
        return self._each(
            len(wanted),
            lambda own: (
                (own[(own >= start) & (own < wanted.stop) & ((own - start) % step == 0)] - start)
                // step
            ),
        )

    def placed(self, start: int, step: int, size: int) -> Cut:
        """Return the cut of a dimension of `size`, of whose entries from `start` this is the cut."""
        return self._each(size, lambda own: start + own * step)

    def positions_in(self, other: Cut) -> tuple[Entries, ...] | None:
        """Return where each rank finds its entries in what it has by another cut; None where a rank
        lacks some.
        """
        found = []
        for own, has in zip(self.entries, other.entries, strict=True):
            order = np.argsort(has, kind="stable")
            places = np.searchsorted(has, own, sorter=order)
            if len(has) == 0 or (places >= len(has)).any():
                return None
            places = order[places]
            if not np.array_equal(has[places], own):
                return None
            found.append(places)
        return tuple(found)

    def _each(self, size: int, change: Any) -> Cut:
        # Ranks that have the same are common: a cut's lists are changed once each
        done: dict[int, Entries] = {}
        for own in self.entries:
            if id(own) not in done:
                done[id(own)] = change(own)
        return Cut(size, tuple(done[id(own)] for own in self.entries))


def everything(size: int, world_size: int) -> Cut:
    """Return the cut that leaves a dimension whole."""
    return Cut(size, (np.arange(size),) * world_size)


def evenly(size: int, world_size: int) -> Cut | None:
    """Return the cut in runs of equal lengths; None where the size does not divide."""
    return None if size % world_size else nearly_evenly(size, world_size)


def nearly_evenly(size: int, world_size: int) -> Cut:
    """Return the cut in runs whose lengths differ by one at most."""
    return Cut(size, tuple(np.array_split(np.arange(size), world_size)))


def joined(cuts: Sequence[Cut]) -> Cut:
    """Return the cut of dimensions one after the other."""
    size = sum(cut.size for cut in cuts)
    starts = np.cumsum([0, *(cut.size for cut in cuts)])
    placed = [cut.placed(int(start), 1, size) for cut, start in zip(cuts, starts, strict=False)]
    ranks = zip(*(cut.entries for cut in placed), strict=True)
    return Cut(size, tuple(np.concatenate(own) for own in ranks))


def union(cuts: Sequence[Cut]) -> Cut:
    """Return the cut with all that several cuts of one dimension have, in order."""
    first = cuts[0]
    if all(first.same_as(cut) for cut in cuts[1:]):
        return first
    ranks = zip(*(cut.entries for cut in cuts), strict=True)
    return Cut(first.size, tuple(np.unique(np.concatenate(own)) for own in ranks))


def runs(entries: Entries) -> list[tuple[int, int]]:
    """Return entries as (start, stop) of their runs.

    >>> runs(np.array([0, 1, 2, 8, 9]))
    [(0, 3), (8, 10)]
    """
    if not len(entries):
        return []
    breaks = np.flatnonzero(np.diff(entries) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(entries, breaks)]


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on the ranks."""

    cuts: Mapping[int, Cut] = field(default_factory=lambda: MappingProxyType({}))
    """By dimension; the others are whole."""
    partial: str = ""
    """The kind of layer whose sum over the ranks the tensor is; "" for none."""

    def same_as(self, other: Layout) -> bool:
        """Whether another layout gives every rank the same."""
        return (
            self.partial == other.partial
            and self.cuts.keys() == other.cuts.keys()
            and all(cut.same_as(other.cuts[dim]) for dim, cut in self.cuts.items())
        )


WHOLE = Layout()


def layout_of(cuts: Iterable[tuple[int, Cut | None]], partial: str = "") -> Layout:
    """Return the layout with those of the cuts that take something away."""
    return Layout({dim: cut for dim, cut in cuts if cut is not None and not cut.is_whole}, partial)


def _is_run(entries: Entries, start: int) -> bool:
    return (
        bool(len(entries))
        and bool(entries[0] == start and entries[-1] == start + len(entries) - 1)
        and bool((np.diff(entries) == 1).all())
    )


def _blocks(entries: Entries, length: int) -> Entries:
    return (entries[:, None] * length + np.arange(length)[None, :]).reshape(-1)


def _served_alike(serving: Sequence[Entries]) -> int:
    """Return the largest length of runs, from the first entry on, in which all have one value."""
    count = len(serving[0])
    lengths = (length for length in range(count, 0, -1) if count % length == 0)
    runs_of = ((length, (own.reshape(-1, length) for own in serving)) for length in lengths)
    return next(
        length for length, rows in runs_of if all((each == each[:, :1]).all() for each in rows)
    )

"""How many layers a reduced run has: enough for every kind of layer, if few are."""

from __future__ import annotations

from collections.abc import Iterable

MOST_REDUCED_LAYERS = 8
"""A reduced run takes as many layers as it needs to have every kind, up to this many; two when it
needs more.
"""


def reduced_depth(firsts: Iterable[int], total: int) -> int:
    """Return how many of `total` layers a reduced run has, for kinds whose first layers are at
    `firsts`.
    """
    needed = max([2, *(first + 1 for first in firsts)])
    return min(needed if needed <= MOST_REDUCED_LAYERS else 2, total)

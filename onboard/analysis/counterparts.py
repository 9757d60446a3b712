"""Which of transformers' results a module's own stand for, where transformers returns more of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def counterparts(actual: Sequence[Any], expected: Sequence[Any]) -> list[Any]:
    """Return which of `expected` each of `actual` stands for, in order.

    One that is left out (attention's weights, before what an indexer chose) has another shape than its follower.
    """
    found: list[Any] = []
    rest = list(expected)
    for index, ours in enumerate(actual):
        spare = len(rest) - (len(actual) - index)
        shapes = [getattr(item, "shape", None) for item in rest[: spare + 1]]
        own = getattr(ours, "shape", None)
        skipped = shapes.index(own) if own in shapes else 0
        found.append(rest[skipped])
        rest = rest[skipped + 1 :]
    return found

"""Errors that may not be numbers: such a one is never within a limit."""

from __future__ import annotations

from collections.abc import Iterable


def worst(errors: Iterable[float]) -> float:
    """Return the largest error; one that is not a number is larger than any other, which `max` would pass over."""
    return max(errors, key=lambda error: (error != error, error))

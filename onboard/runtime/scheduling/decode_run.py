"""Consecutive decode steps of one unchanged batch: when pages run out or limits are reached is
computed once, at the first step.
"""

from __future__ import annotations

from collections.abc import Sequence

from onboard.cache.step_buffer import IntArray
from onboard.runtime.scheduling.request import Chunk, Step


class DecodeRun:
    """Consecutive decode steps of one batch.

    `cached` [sequences] are the cached tokens of each sequence before the first step. `borders` are
    remainders modulo the page size: a sequence needs attention (a new page, a page that is full or
    has left a window) when its number of cached tokens has such a remainder.
    """

    def __init__(
        self, step: Step, cached: IntArray, borders: Sequence[int], page_size: int
    ) -> None:
        self.chunks: list[Chunk] = step.chunks
        self.num_steps = 0
        """Number of steps launched so far."""
        self._last = int((step.rows.limits - cached).min()) - 1
        self._due: list[list[int]] = [[] for _ in range(page_size)]
        for border in borders:
            for row, steps in enumerate(((border - cached) % page_size).tolist()):
                self._due[steps].append(row)

    @property
    def due(self) -> Sequence[int]:
        """Indices of the sequences that are at a border now."""
        return self._due[self.num_steps % len(self._due)]

    @property
    def at_limit(self) -> bool:
        """Whether a sequence has reached its token limit, counting the token that only the device
        knows so far.
        """
        return self.num_steps >= self._last

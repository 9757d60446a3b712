"""Steps in which one batch does nothing but decode: what they need beside tokens is known from the
first one on.
"""

from __future__ import annotations

from collections.abc import Sequence

from onboard.cache.step_buffer import IntArray
from onboard.runtime.scheduling.request import Chunk, Step


class DecodeRun:
    """The steps of one batch, all of whose sequences go on by one token.

    `cached` [sequences] tokens of each were cached before the first step. `borders` are remainders
    of the page size: something is due for a sequence when as many tokens of it are cached.
    """

    def __init__(
        self, step: Step, cached: IntArray, borders: Sequence[int], page_size: int
    ) -> None:
        self.chunks: list[Chunk] = step.chunks
        self.num_steps = 0
        """Steps that were started."""
        self._last = int((step.rows.limits - cached).min()) - 1
        self._due: list[list[int]] = [[] for _ in range(page_size)]
        for border in borders:
            for row, steps in enumerate(((border - cached) % page_size).tolist()):
                self._due[steps].append(row)

    @property
    def due(self) -> Sequence[int]:
        """The sequences of which as many tokens are cached now as a border says."""
        return self._due[self.num_steps % len(self._due)]

    @property
    def at_limit(self) -> bool:
        """Whether some sequence has all the tokens that it may have, those that only the device
        knows included.
        """
        return self.num_steps >= self._last

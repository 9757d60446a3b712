"""Which captured step serves a step that reads prompts or drafts: one of more tokens, sequences and
rows of logits, to which it is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from onboard.cache.step_buffer import StepSizes


class StepTimes(NamedTuple):
    """Seconds of a step of a captured size."""

    captured: float
    otherwise: float
    """Without its graph, and without padding."""


@dataclass
class CapturedSteps:
    """The captured steps that read prompts, or drafts."""

    longest: int
    """Tokens of the longest sequence: padding is one."""
    times: dict[StepSizes, dict[bool, StepTimes]] = field(default_factory=dict)
    """By size, and whether all sequences begin with the step; sizes ascend."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.times)

    def serving(self, step: StepSizes, *, whole: bool) -> StepSizes | None:
        """Return the smallest size with room for a step and at least one sequence of padding; None if
        there is none, or the step is faster by itself.
        """
        for below, size in self._pairs():
            fits = step.sequences < size.sequences and step.rows <= size.rows
            if fits and 0 <= size.tokens - step.tokens <= self.longest:
                return size if self._is_faster(below, size, step.tokens, whole) else None
        return None

    def _pairs(self) -> Iterator[tuple[StepSizes, StepSizes]]:
        """Yield each size behind the one below it, the first behind itself."""
        sizes = list(self.times)
        return pairwise([*sizes[:1], *sizes])

    def _is_faster(self, below: StepSizes, size: StepSizes, tokens: int, whole: bool) -> bool:
        """Whether a replay takes less time than a step of so many tokens by itself, whose time is
        interpolated between sizes.
        """
        first, last = self.times[below][whole].otherwise, self.times[size][whole].otherwise
        span = size.tokens - below.tokens
        share = (tokens - below.tokens) / span if span else 1.0
        return self.times[size][whole].captured <= first + min(max(share, 0.0), 1.0) * (
            last - first
        )

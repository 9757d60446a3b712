"""The rule for an error in float32 beyond `SAME`: ours counts as the reference where it errs about
as little as the reference's own float32 does, both against the reference in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import MARGIN, MOST_ROUNDING


@dataclass(frozen=True)
class Rounding:
    """Errors against the reference in float64, the largest of any text."""

    ours: float
    theirs: float
    """Of the reference's own float32."""

    @property
    def is_theirs(self) -> bool:
        """Whether ours rounds no more than the reference does."""
        return 0 <= self.ours <= min(MARGIN * self.theirs, MOST_ROUNDING)


def rounding(
    ours: Iterable[torch.Tensor],
    theirs: Iterable[torch.Tensor],
    exact: Iterable[torch.Tensor],
    error: Callable[[torch.Tensor, torch.Tensor], float] = rmse_ratio,
) -> Rounding | None:
    """Return the errors of two models' logits of the same texts, `exact` those in float64; None
    where one is no finite number.
    """
    exact = list(exact)
    found = [worst(map(error, side, exact)) for side in (ours, theirs)]
    return Rounding(*found) if all(map(math.isfinite, found)) else None

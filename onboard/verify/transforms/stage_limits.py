"""How much the logits may err after a transform: as much as what they are compared with errs in the run's
dtype itself, with inputs in eight bits where the run has come to compute with such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.graph.context import TransformContext
from onboard.verify.error import rmse_ratio
from onboard.verify.hf_logits import Asked, Reference, References
from onboard.verify.quantised_inputs import quantising_transforms
from onboard.verify.rounding.torn_rows import row_errors, torn
from onboard.verify.tolerances import FLOOR_OF_STAGES, MARGIN_OF_STAGES, MARGIN_OF_TORN, SAME
from onboard.verify.transforms.trial import make_prompts

_MORE_DRAWS = 3
"""Of texts that the reference alone reads in half precision: of few texts it is chance whether rounding
makes a router choose otherwise in one of them.
"""


@dataclass(frozen=True)
class Limit:
    """What the worst text may err by, and, where a few rows that rounding tears are most of the
    reference's own error, the median row of all texts.
    """

    error: float
    usual: float | None = None
    reference_error: float = 0.0
    """The error of the reference in the run's dtype, against itself in float32; 0 in float32."""


class Limits:
    """The reference's logits of all prompts, and the limit as the pipeline goes on."""

    def __init__(
        self, context: TransformContext, prompts: Sequence[list[int]], seed: int, references: References
    ) -> None:  # fmt: skip
        self._context, self._references = context, references
        self._asked = [Asked.whole(prompt) for prompt in prompts]
        if context.dtype != torch.float32:
            draws = (make_prompts(context, seed + i) for i in range(1, 1 + _MORE_DRAWS))
            self._asked += [Asked.whole(prompt) for drawn in draws for prompt in drawn]
        self._quantising = quantising_transforms(context)
        reference = self._reference()
        self.exact = reference.exact[: len(prompts)]
        """In float32, of each prompt."""
        self.beside = reference.whose

    def _reference(self) -> Reference:
        reference = self._references(self._context, self._asked)
        self.limit = limit_of(reference.own, reference.exact)
        return reference

    def now(self) -> Limit:
        """Return the limit after the transform that has just run."""
        quantising = quantising_transforms(self._context)
        if quantising != self._quantising and self._context.dtype != torch.float32:
            self._quantising = quantising
            self._reference()
        return self.limit


def limit_of(own: Sequence[Tensor] | None, exact: Sequence[Tensor]) -> Limit:
    """Return the limit beside a reference whose logits of each text [tokens, vocabulary] are `own` in the
    run's dtype, if that is another one, and `exact` in float32.
    """
    if own is None:
        return Limit(SAME)
    worst, errors = (
        worst_error(own, exact),
        row_errors(torch.cat(list(own)), torch.cat(list(exact))),
    )
    median = float(errors.median())
    usual = None
    if torn(errors).any() and worst >= MARGIN_OF_TORN * median:
        usual = MARGIN_OF_STAGES * median + FLOOR_OF_STAGES
    return Limit(MARGIN_OF_STAGES * worst + FLOOR_OF_STAGES, usual, worst)


def worst_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error over texts, NaN if any is (which Python's `max` hides behind a number)."""
    errors = [rmse_ratio(ours, theirs) for ours, theirs in zip(actual, expected, strict=True)]
    return float(torch.tensor(errors, dtype=torch.float64).max())


def usual_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the error of the median row of all texts."""
    return float(row_errors(torch.cat(list(actual)), torch.cat(list(expected))).median())

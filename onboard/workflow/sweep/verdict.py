"""What the judge of a target says: measures, and whether they are near enough."""

from __future__ import annotations

from pydantic import Field

from onboard.config import StrictModel
from onboard.verify.rounding.against_float64 import Rounding
from onboard.verify.tolerances import SAME

NEW_TOKENS = 48
"""Tokens that are generated for each prompt."""


class Verdict(StrictModel):
    """What the judge measured; errors are rmse(ours - theirs) / rmse(theirs), the largest of any
    prompt.
    """

    seed: int | None = None
    """Of the prompts; None: the judge came to no end."""
    world_size: int = 1
    """Ranks that ran ours."""
    divided: dict[str, int] = Field(default_factory=dict)
    """Layer type -> weights that several ranks divided."""
    weights: int = 0
    """How many the model has."""
    lengths: list[int] = Field(default_factory=list)
    prefill_error: float | None = None
    """Of logits; None: not a number, or never measured."""
    decode_error: float | None = None
    """Of the log-probabilities that the tokens were chosen by, each row around its mean."""
    prefill_rounding: Rounding | None = None
    """Measured where the error is beyond the limit."""
    decode_rounding: Rounding | None = None
    distinct: bool = False
    """Transformers' own logits of repeated tokens change when a text goes on: no token came twice
    in a text.
    """
    draws: int = 0
    """Times that prompts were drawn, of such lengths each time, until enough of what follows them
    was text.
    """
    tokens: int = 0
    """Greedy tokens that were compared."""
    differing: int = 0
    """Of these, not transformers' choice."""
    largest_gap: float | None = None
    """How far below transformers' best logit a token's lies, as a share of the row's spread."""
    error: str = ""
    """Why nothing could be compared."""
    refused: str = ""
    """Why ranks cannot divide the model."""

    @property
    def enough(self) -> bool:
        """Whether enough tokens could be compared."""
        return bool(self.lengths) and 2 * self.tokens >= len(self.lengths) * NEW_TOKENS

    @property
    def agrees(self) -> bool:
        """Whether everything was measured, and is within the limit."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why it does not agree; empty if it does."""
        if self.error or self.refused:
            return self.error or self.refused
        if not _within(self.prefill_error, self.prefill_rounding):
            return f"logits of prompts differ from transformers' by {_shown(self.prefill_error)}"
        if not self.enough:
            return f"only {self.tokens} tokens of {len(self.lengths)} prompts could be compared"
        if self.differing or not _within(self.largest_gap):
            return f"{self.differing} of {self.tokens} greedy tokens are not transformers' choice"
        if not _within(self.decode_error, self.decode_rounding):
            return f"log-probabilities of decoded tokens differ from transformers' by {_shown(self.decode_error)}"
        return ""


def _within(error: float | None, rounding: Rounding | None = None) -> bool:
    if rounding is not None and rounding.is_theirs:
        return True
    return error is not None and 0 <= error <= SAME


def _shown(error: float | None) -> str:
    return "what is no number" if error is None else f"{error:.1e}"

"""What the judge of a target says: measures, and whether they are near enough."""

from __future__ import annotations

from pydantic import Field

from onboard.config import StrictModel

LIMIT = 1e-5
"""Largest error in float32."""
NEW_TOKENS = 48
"""Tokens that are generated for each prompt."""


class Verdict(StrictModel):
    """What the judge measured; errors are rmse(ours - theirs) / rmse(theirs), the largest of any prompt."""

    seed: int | None = None
    """Of the prompts; None: the judge came to no end."""
    lengths: list[int] = Field(default_factory=list)
    prefill_error: float | None = None
    """Of logits; None: not a number, or never measured."""
    decode_error: float | None = None
    """Of the log-probabilities that the tokens were chosen by, each row around its mean."""
    tokens: int = 0
    """Greedy tokens that were compared."""
    differing: int = 0
    """Of these, not transformers' choice."""
    largest_gap: float | None = None
    """How far below transformers' best logit a token's lies, as a share of the row's spread."""
    error: str = ""
    """Why nothing could be compared."""

    @property
    def agrees(self) -> bool:
        """Whether everything was measured, and is within the limit."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why it does not agree; empty if it does."""
        if self.error:
            return self.error
        if not _within(self.prefill_error):
            return f"logits of prompts differ from transformers' by {_shown(self.prefill_error)}"
        if 2 * self.tokens < len(self.lengths) * NEW_TOKENS or not self.lengths:
            return f"only {self.tokens} tokens of {len(self.lengths)} prompts could be compared"
        if self.differing or not _within(self.largest_gap):
            return f"{self.differing} of {self.tokens} greedy tokens are not transformers' choice"
        if not _within(self.decode_error):
            return f"log-probabilities of decoded tokens differ from transformers' by {_shown(self.decode_error)}"
        return ""


def _within(error: float | None) -> bool:
    return error is not None and 0 <= error <= LIMIT


def _shown(error: float | None) -> str:
    return "what is no number" if error is None else f"{error:.1e}"

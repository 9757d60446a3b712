"""One comparison of a run's logits with the reference's: the error, its limit, and whose rounding it
is where it is beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass

from onboard.verify.rounding.against_float64 import Rounding


@dataclass(frozen=True)
class Check:
    """One comparison of logits."""

    what: str
    tokens: int
    longest: int
    """Tokens of the longest passage."""
    error: float | None
    """None: not a number, which is within no limit."""
    limit: float | None
    transformers: float | None = None
    """The error of transformers in the run's dtype; None in float32."""
    rounding: Rounding | None = None
    """Measured in float32 where the error is beyond the limit."""
    zeros: bool = False
    """All logits of a passage are zero in the reference, as weights of zeros make them: no error is
    relative to that.
    """
    torn: int = 0
    """Rows of the reference's own that rounding tears, where the limit is that of such."""

    @property
    def is_within(self) -> bool:
        """Whether the error is a number within the limit."""
        return self.error is not None and self.limit is not None and self.error <= self.limit

    @property
    def passes(self) -> bool:
        """Whether the error is within the limit, or is the reference's rounding."""
        return self.is_within or (self.rounding is not None and self.rounding.is_theirs)

    def as_rounding(self, beside: str) -> str:
        """Return that an error beyond the limit passes as rounding; empty where none does."""
        if self.torn and self.is_within:
            return (
                f"{self.what}: rounding makes other choices in {self.torn} rows of {beside}'s own logits;"
                f" in half of the rows ours err as those do (error {_shown(self.error)}{self._own(beside)})"
            )
        if self.is_within or not self.passes:
            return ""
        sizes = f"error {_shown(self.error)}, more than {_shown(self.limit)}{self._own(beside)}"
        return f"{self.what}: the logits are those of {beside} but for its own rounding ({sizes})"

    def problem(self, beside: str) -> str:
        """Return what an error that does not pass says, in one sentence; `beside` is the
        reference's name.
        """
        if self.zeros:
            why = "as weights of zeros make them: they prove nothing"
            return f"{self.what}: the logits of {beside} are all zero, {why}"
        sizes = f"error {_shown(self.error)}, at most {_shown(self.limit)}{self._own(beside)}"
        return f"{self.what}: the logits are not those of {beside} ({sizes})"

    def _own(self, beside: str) -> str:
        """Return what is known of the reference's own error."""
        if self.rounding is not None:
            errors = _shown(self.rounding.ours), _shown(self.rounding.theirs)
            return f"; against its float64 {errors[0]}, that of its own float32 {errors[1]}"
        if self.transformers is None:
            return ""
        return f"; {beside} itself errs by {self.transformers:.2e}"


def _shown(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.2e}"

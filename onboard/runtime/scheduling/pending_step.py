"""Steps that were launched, and how their tokens reach the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch

from onboard.cache.next_token import LatestTokens
from onboard.cache.step_buffer import IntArray
from onboard.errors import NotFiniteError
from onboard.ops.sampling.sampling import NOT_A_TOKEN
from onboard.runtime.scheduling.request import Step
from onboard.runtime.speculation.drafted_rows import DraftedRows

# Steps whose tokens may be on their way: the one that the host waits for, and the one launched
# ahead of it. An event is recorded again only after its step's tokens were read.
_AT_A_TIME = 2


@dataclass
class PendingStep:
    """A step that was launched; `tokens()` waits for it and returns its tokens."""

    step: Step
    tokens: Callable[[], list[int]]
    logits: torch.Tensor | None
    """[rows, vocabulary] if a sequence's log-probabilities are wanted, else None; a row for each
    sequence, or draft.
    """
    drafted: DraftedRows | None = None
    """The rows of logits of a step with drafts."""
    of_step: Callable[[], torch.Tensor] | None = None
    """Returns the logits [rows, vocabulary], until the next step is launched."""

    def chosen(self) -> list[int]:
        """Wait for the step; return one token for each sequence, perhaps followed by padding, or for
        each row of a step with drafts.

        Raises `NotFiniteError` if a token was chosen from NaN or infinite logits.
        """
        tokens, complete = self.tokens(), self.step.rows.complete
        if NOT_A_TOKEN in tokens and (
            self.drafted is not None
            or any(
                tokens[row] == NOT_A_TOKEN and each.finish_reason is None for row, each in complete
            )
        ):
            raise NotFiniteError("the logits are not finite", hint="Use dtype bfloat16 or float32")
        return tokens


class TokenReceiver:
    """Gets a step's tokens to the host: the sampling kernel writes them to pinned host memory, and
    a CUDA event tells when it has.
    """

    def __init__(self, latest: LatestTokens) -> None:
        self._landed = latest.landed
        if self._landed is not None:
            self._events = cycle([torch.cuda.Event() for _ in range(_AT_A_TIME)])  # type: ignore[no-untyped-call]

    def receive(
        self, tokens: torch.Tensor, slots: IntArray, lengths: IntArray
    ) -> Callable[[], list[int]]:
        """Return a function that waits for the tokens of the step just launched and returns them.

        `lengths` [sequences] are the cached tokens of each sequence of `slots` after the step. Call
        this after the launch, before the next one: the event marks the end of the work enqueued so
        far.
        """
        if self._landed is None:
            # `tokens` is a static output that the next launch overwrites; the clone is enqueued
            # before it, and `tolist` waits for the device.
            return tokens.clone().tolist
        return self._when_landed(self._landed, slots, lengths)

    def _when_landed(
        self, landed: IntArray, slots: IntArray, lengths: IntArray
    ) -> Callable[[], list[int]]:
        arrived = next(self._events)
        arrived.record()

        def wait() -> list[int]:
            # The host waits for this step alone. The next one may run already: it writes the other
            # column of `landed` (the parity of the length), so nothing is overwritten.
            arrived.synchronize()
            values: list[int] = landed[slots, lengths % 2].tolist()
            return values

        return wait

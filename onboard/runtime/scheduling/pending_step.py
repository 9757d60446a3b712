"""A step that the device has been asked for, and how its tokens come to the host."""

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

_AT_A_TIME = 2  # steps whose tokens may be on their way


@dataclass
class PendingStep:
    """A step that was started; `tokens` waits for it."""

    step: Step
    tokens: Callable[[], list[int]]
    logits: torch.Tensor | None
    """[rows, vocabulary], when some sequence's log-probabilities are wanted."""

    def chosen(self) -> list[int]:
        """Wait; return a token a row, padding perhaps behind them.

        Raises `NotFiniteError` for a token that was chosen from NaN or infinite logits.
        """
        tokens, complete = self.tokens(), self.step.rows.complete
        if NOT_A_TOKEN in tokens and any(
            tokens[row] == NOT_A_TOKEN and each.finish_reason is None for row, each in complete
        ):
            raise NotFiniteError("the logits are not finite", hint="Use dtype bfloat16 or float32")
        return tokens


class TokenReceiver:
    """How a step's tokens come to the host: kernels write them there, and an event says when."""

    def __init__(self, latest: LatestTokens) -> None:
        self._landed = latest.landed
        if self._landed is not None:
            self._events = cycle([torch.cuda.Event() for _ in range(_AT_A_TIME)])  # type: ignore[no-untyped-call]

    def receive(
        self, tokens: torch.Tensor, slots: IntArray, lengths: IntArray
    ) -> Callable[[], list[int]]:
        """Return what waits for the tokens of a step that was started: those behind `lengths`
        tokens of `slots`.
        """
        if self._landed is None:
            return tokens.clone().tolist  # a later step may overwrite them
        return self._when_landed(self._landed, slots, lengths)

    def _when_landed(
        self, landed: IntArray, slots: IntArray, lengths: IntArray
    ) -> Callable[[], list[int]]:
        arrived = next(self._events)
        arrived.record()

        def wait() -> list[int]:
            arrived.synchronize()
            values: list[int] = landed[slots, lengths % 2].tolist()
            return values

        return wait

"""A step that the device has been asked for, and how its tokens come to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from onboard.errors import NotFiniteError
from onboard.ops.sampling import NOT_A_TOKEN
from onboard.runtime.request import Request, Step

_AT_A_TIME = 2  # steps whose tokens may be on their way


@dataclass
class Flight:
    """A step that was started; `tokens` waits for it."""

    step: Step
    complete: list[tuple[int, Request]]
    """The sequences whose next token it chooses, and their rows."""
    tokens: Callable[[], list[int]]
    logits: torch.Tensor | None
    """[rows, vocabulary], when some sequence's log-probabilities are wanted."""

    def chosen(self) -> Iterator[tuple[int, Request, int]]:
        """Wait; yield row, sequence and token, without what was finished or cancelled meanwhile.

        Raises `NotFiniteError` for a token that was chosen from NaN or infinite logits.
        """
        tokens = self.tokens()
        for row, sequence in self.complete:
            if sequence.finish_reason is not None:
                continue
            if tokens[row] == NOT_A_TOKEN:
                raise NotFiniteError("the logits are not finite", hint="Use dtype bfloat16 or float32")
            yield row, sequence, tokens[row]


class Landing:
    """Where tokens arrive: on a GPU, host buffers to which they are copied while the device goes on."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._buffers: Iterator[torch.Tensor] | None = None
        if device.type == "cuda":
            buffers = [torch.zeros(rows, dtype=torch.int64, pin_memory=True) for _ in range(_AT_A_TIME)]
            self._buffers = cycle(buffers)

    def receive(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        """Start the copy of a step's tokens; return what waits for them."""
        if self._buffers is None:
            return tokens.tolist
        place = next(self._buffers)[: len(tokens)]
        place.copy_(tokens, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def wait() -> list[int]:
            arrived.synchronize()
            values: list[int] = place.tolist()
            return values

        return wait

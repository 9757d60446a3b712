"""The answers to one prompt: the model's news, read into pieces."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from onboard.runtime.calls.outputs import Delta
from onboard.runtime.sampling_params import SamplingParams
from onboard.serve.answers.answer_pieces import ArgumentsPiece, CallPiece, Piece, TextPiece
from onboard.serve.answers.call_pieces import GrowingCalls, whole_calls
from onboard.serve.service import Prompt, Service


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> Iterator[Piece]:
        """Yield the pieces that more text completes."""

    def end(self) -> Iterator[Piece]:
        """Yield what is left when the text has ended."""


@dataclass(frozen=True)
class News:
    """What one output has got: tokens, and the pieces that they complete."""

    delta: Delta
    pieces: list[Piece]


async def answers(
    service: Service, prompt: Prompt, params: SamplingParams, reader: Callable[[], Reader]
) -> AsyncGenerator[News, None]:
    """Generate, and yield what comes, output by output; leaving cancels it.

    Raises `RefusedError` if too many requests run, `UsageError` for a prompt that is too long.
    """
    readers = [reader() for _ in range(params.n)]
    async with service.admitted(), aclosing(service.follow(prompt, params)) as deltas:
        async for delta in deltas:
            pieces = list(readers[delta.index].feed(delta.text))
            if delta.finish_reason is not None:
                pieces += readers[delta.index].end()
            yield News(delta, pieces)


class ForcedCalls:
    """Reads an answer that was held to JSON because a call of a tool is required.

    `name` is the function of the only call, whose arguments the answer is; None: it is a list of
    objects with name and parameters. `in_pieces`: arguments are told as they come.
    """

    def __init__(self, name: str | None, *, in_pieces: bool = False) -> None:
        self._name = name
        self._text = ""
        self._in_pieces = in_pieces
        self._listed = GrowingCalls()

    def feed(self, text: str) -> Iterator[Piece]:
        """Pass the text on as arguments, or keep it."""
        if self._in_pieces and self._name is None:
            yield from self._listed.more(text)
        elif self._in_pieces and text:
            if not self._text:
                yield CallPiece(0, self._name or "", "")
            yield ArgumentsPiece(0, text)
        self._text += text

    def end(self) -> Iterator[Piece]:
        """Yield the calls that were not told; text that is cut off before one is whole stays
        text.
        """
        if self._in_pieces and self._name is not None:
            return
        calls = whole_calls(self._text) if self._name is None else self._only_call(self._name)
        told = self._listed.count
        for number, (name, arguments) in enumerate(calls[told:], told):
            yield CallPiece(number, name, json.dumps(arguments, ensure_ascii=False))
        if not calls and not told:
            yield TextPiece(self._text)

    def _only_call(self, name: str) -> list[tuple[str, Any]]:
        try:
            return [(name, json.loads(self._text))]
        except ValueError:
            return []

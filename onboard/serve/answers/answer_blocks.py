"""Pieces of an answer as blocks that open, grow and close, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from onboard.serve.answers.answer_pieces import ArgumentsPiece, CallPiece, Piece, ReasoningPiece

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Block:
    """A run of pieces of one kind; a call is a block of its own."""

    kind: Kind
    number: int
    """Which block of the answer, from 0."""
    id: str
    text: str = ""
    """All text so far; of a call, its arguments."""
    name: str = ""
    """Of the tool that is called."""


@dataclass(frozen=True)
class Change:
    """What happens to a block."""

    what: Literal["open", "grow", "close"]
    block: Block
    text: str = ""
    """By what it grows."""


class Blocks:
    """Makes blocks of the pieces of one answer."""

    def __init__(self, new_id: dict[Kind, str], random: Iterator[str]) -> None:
        self.done: list[Block] = []
        """Blocks that have closed."""
        self._open: Block | None = None
        self._prefixes, self._random = new_id, random

    def feed(self, piece: Piece) -> Iterator[Change]:
        """Yield what a piece changes."""
        if isinstance(piece, ArgumentsPiece):
            yield from self._grow(piece.text)
            return
        kind: Kind = "text"
        if isinstance(piece, CallPiece):
            kind = "call"
        elif isinstance(piece, ReasoningPiece):
            kind = "reasoning"
        if self._open is None or self._open.kind != kind or kind == "call":
            yield from self.end()
            self._open = self._new(kind, piece.name if isinstance(piece, CallPiece) else "")
            yield Change("open", self._open)
        yield from self._grow(piece.arguments if isinstance(piece, CallPiece) else piece.text)

    def _grow(self, text: str) -> Iterator[Change]:
        assert self._open is not None
        self._open.text += text
        if text:
            yield Change("grow", self._open, text)

    def end(self) -> Iterator[Change]:
        """Yield what the end of the answer changes."""
        if self._open is not None:
            self.done.append(self._open)
            yield Change("close", self._open)
            self._open = None

    def _new(self, kind: Kind, name: str) -> Block:
        return Block(kind, len(self.done), self._prefixes[kind] + next(self._random), name=name)

"""The pieces that an answer consists of, whatever words a client's interface has for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class TextPiece:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class ReasoningPiece:
    """Text that the model thinks."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """A call of a tool: whole, or its beginning."""

    number: int
    """Which call of the answer, from 0."""
    name: str
    arguments: str
    """A JSON object, as text; as much of it as is there."""


@dataclass(frozen=True)
class ArgumentsPiece:
    """More of the arguments of the call that has begun last."""

    number: int
    text: str


Piece = TextPiece | ReasoningPiece | CallPiece | ArgumentsPiece


@dataclass
class Answer:
    """All pieces of an answer put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Put one more piece behind the others."""
        if isinstance(piece, CallPiece):
            self.calls.append(piece)
        elif isinstance(piece, ArgumentsPiece):
            last = self.calls[-1]
            self.calls[-1] = replace(last, arguments=last.arguments + piece.text)
        elif isinstance(piece, ReasoningPiece):
            self.reasoning += piece.text
        else:
            self.text += piece.text


Tools = list[dict[str, Any]]
"""Functions as OpenAI's chat interface describes them."""

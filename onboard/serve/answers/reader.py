"""Reads what a model writes, as it comes, into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from onboard.serve.answers.answer_pieces import CallPiece, Piece, ReasoningPiece, TextPiece, Tools
from onboard.serve.answers.formats import BEGINNING, Format

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What templates call thoughts."""


class AnswerReader:
    """Takes the text of one answer apart.

    Args:
        shape: how the model writes; None: what it writes is text, whatever is in it.
        prompt: what the model was given; `turn` is its end, the beginning of the model's turn.
        removed: texts of special tokens, which no client sees.
    """

    def __init__(
        self,
        shape: Format | None,
        prompt: str,
        turn: str,
        tools: Tools | None = None,
        removed: Sequence[str] = (),
    ) -> None:
        self._removed = [mark for mark in removed if mark]
        self._calls = 0
        self._raw = ""
        self._begins = False
        self._parser: Any = None
        if shape is not None:
            ours = shape.get("start_anchor") == BEGINNING
            prefix = BEGINNING + turn.rstrip() if ours else prompt
            self._parser = ResponseParser(dict(shape), prefix=prefix, tools=tools)

    def feed(self, text: str) -> Iterator[Piece]:
        """Yield the pieces that more text completes."""
        yield from self._text(text) if self._parser is None else self._parsed(text)

    def end(self) -> Iterator[Piece]:
        """Yield what is left when the text has ended."""
        if self._parser is not None:
            yield from self._parsed(None)

    def _parsed(self, text: str | None) -> Iterator[Piece]:
        """Yield the pieces of more text, or of the end; what cannot be parsed is text."""
        try:
            events = self._parser.finalize()[1] if text is None else self._parser.feed(text)
        except (ValueError, KeyError):
            self._parser = None
            yield from self._text(self._raw + (text or ""))
            return
        for event in events:
            yield from self._pieces(event)

    def _pieces(self, event: dict[str, Any]) -> Iterator[Piece]:
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            self._begins, self._raw = True, ""
        elif kind == "region_chunk" and field in _THOUGHTS:
            yield from (ReasoningPiece(shown) for shown in self._shown(event["text"]))
        elif kind == "region_chunk" and field == "content":
            yield from self._text(event["text"])
        elif kind == "region_chunk":
            self._raw += event["text"]
        elif field == "tool_calls":
            values = event["value"] if isinstance(event["value"], list) else [event["value"]]
            for value in values:
                yield from self._call(value)

    def _call(self, call: Any) -> Iterator[Piece]:
        name, arguments = _called(call)
        if name is None:
            yield from self._text(self._raw)
            return
        yield CallPiece(self._calls, name, arguments)
        self._calls += 1

    def _text(self, text: str) -> Iterator[Piece]:
        yield from (TextPiece(shown) for shown in self._shown(text))

    def _shown(self, text: str) -> Iterator[str]:
        """Yield the text without special tokens, which come whole, and without the empty lines
        behind a mark.
        """
        for mark in self._removed:
            text = text.replace(mark, "")
        text = text.lstrip("\n") if self._begins and self._parser is not None else text
        if text:
            self._begins = False
            yield text


def _called(call: Any) -> tuple[str | None, str]:
    """Return name and arguments of a call; no name where what was written is none."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None, ""
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        return function["name"], arguments
    return function["name"], json.dumps(arguments, ensure_ascii=False)

"""Reads what a model writes, as it comes, into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from onboard.serve.answers.answer_pieces import (
    CallPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
    Tools,
)
from onboard.serve.answers.call_pieces import GrowingCall
from onboard.serve.answers.formats import BEGINNING, Format, names_its_calls

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What templates call thoughts."""


class AnswerReader:
    """Takes the text of one answer apart.

    Args:
        shape: how the model writes; None: what it writes is text, whatever is in it.
        prompt: what the model was given; `turn` is its end, the beginning of the model's turn.
        removed: texts of special tokens, which no client sees.
        in_pieces: whether the arguments of calls are told as they come, where the way they are
            written allows it. They are then what the model writes, whatever becomes of it.
    """

    def __init__(
        self,
        shape: Format | None,
        prompt: str,
        turn: str,
        tools: Tools | None = None,
        removed: Sequence[str] = (),
        *,
        in_pieces: bool = False,
    ) -> None:
        self._removed = [mark for mark in removed if mark]
        self._calls = 0
        self._raw = ""
        self._begins = False
        self._parser: Any = None
        self._names_calls = names_its_calls(shape) if shape is not None and in_pieces else None
        self._growing: GrowingCall | None = None
        """The call that is being written, if its arguments are told as they come."""
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
            told = self._growing is not None and self._growing.begun
            yield from self._text(("" if told else self._raw) + (text or ""))
            return
        for place, event in enumerate(events):
            ends = any(later["type"] == "region_close" for later in events[place:])
            yield from self._pieces(event, ends)

    def _pieces(self, event: dict[str, Any], ends: bool) -> Iterator[Piece]:
        """Yield the pieces of an event of the parser; `ends`: its region has ended already."""
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            self._begins, self._raw = True, ""
            self._growing = None if ends or field != "tool_calls" else self._begun_call()
        elif kind == "region_chunk" and field in _THOUGHTS:
            yield from (ReasoningPiece(shown) for shown in self._shown(event["text"]))
        elif kind == "region_chunk" and field == "content":
            yield from self._text(event["text"])
        elif kind == "region_chunk":
            self._raw += event["text"]
            yield from self._grow(event["text"])
        elif field == "tool_calls" and self._growing is not None and self._growing.begun:
            self._calls += 1
            yield from self._text(self._growing.behind)
        elif field == "tool_calls":
            values = event["value"] if isinstance(event["value"], list) else [event["value"]]
            for value in values:
                yield from self._call(value)

    def _begun_call(self) -> GrowingCall | None:
        """Return a call that begins; None if it is told when it is whole."""
        if self._names_calls is None:
            return None
        # The parser's own attribute: its events do not have what a mark has named.
        name = getattr(self._parser, "_captures", {}).get("name")
        return GrowingCall(name) if self._names_calls is bool(name) else None

    def _grow(self, text: str) -> Iterator[Piece]:
        """Yield what more text of a call tells of it."""
        if self._growing is not None:
            yield from self._growing.pieces(self._calls, text)

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

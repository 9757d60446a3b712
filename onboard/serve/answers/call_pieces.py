"""Calls of tools while they are written: their arguments, as far as they have come."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from onboard.serve.answers.answer_pieces import ArgumentsPiece, CallPiece, Piece

_BEFORE_ARGUMENTS = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_SPACE = re.compile(r"\s*(?=\{)")
_MOST_BEFORE = 1024
"""Characters before the arguments of a call; one that has more comes whole."""


class GrowingObject:
    """A JSON object as text that grows."""

    def __init__(self) -> None:
        self.behind = ""
        """What has come behind its end."""
        self._depth = 0
        self._in_text = self._escaped = self._ended = False

    def more(self, text: str) -> str:
        """Return what of more text is the object's."""
        for place, character in enumerate(text):
            if self._ended:
                self.behind += text[place:]
                return text[:place]
            self._take(character)
        return text

    def _take(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_text:
            self._escaped = character == "\\"
            self._in_text = character != '"'
        elif character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self._ended = not self._depth


class GrowingCall:
    """A call whose arguments are passed on as they come.

    `name` is what a mark before it says; None: it is an object with the name, then the arguments.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.begun = False
        """Whether the name is known and the arguments have begun."""
        self._arguments = GrowingObject()
        self._before = ""
        self._pattern = _BEFORE_ARGUMENTS if name is None else _SPACE

    @property
    def behind(self) -> str:
        """What was written behind the call, but for its marks."""
        return "" if self._arguments.behind.strip(" \n\t}") == "" else self._arguments.behind

    @property
    def rest(self) -> str | None:
        """What was written behind the object that the call is; None while it has not ended."""
        _, end, rest = self._arguments.behind.partition("}")
        return rest if end else None

    def pieces(self, number: int, text: str) -> Iterator[Piece]:
        """Yield what more text tells of the call, the answer's `number`th."""
        had, more = self.begun, self.more(text)
        if self.begun and not had:
            assert self.name is not None
            yield CallPiece(number, self.name, "")
        if more:
            yield ArgumentsPiece(number, more)

    def more(self, text: str) -> str:
        """Return what more text adds to the arguments; nothing while they have not begun."""
        if self.begun:
            return self._arguments.more(text)
        if len(self._before) > _MOST_BEFORE:
            return ""
        self._before += text
        if (found := self._pattern.match(self._before)) is None:
            return ""
        if self.name is None:
            try:
                self.name = json.loads(found[1])
            except ValueError:
                self._before += " " * _MOST_BEFORE  # it is no call
                return ""
        self.begun = True
        return self._arguments.more(self._before[found.end() :])


class GrowingCalls:
    """A list of objects with a name, then parameters, as text that grows; between them no brace
    stands.
    """

    def __init__(self) -> None:
        self._ended = 0
        self._call: GrowingCall | None = None

    @property
    def count(self) -> int:
        """How many calls were told, the last one perhaps not whole."""
        return self._ended + (self._call is not None and self._call.begun)

    def more(self, text: str) -> Iterator[Piece]:
        """Yield what more text tells of the calls."""
        while text:
            if self._call is None:
                _, mark, behind = text.partition("{")
                if not mark:
                    return
                self._call, text = GrowingCall(None), mark + behind
            yield from self._call.pieces(self._ended, text)
            if (rest := self._call.rest) is None:
                return
            self._ended, self._call, text = self._ended + 1, None, rest


def whole_calls(text: str) -> list[tuple[str, Any]]:
    """Return names and parameters of the calls of a list, as far as they are whole."""
    decoder, calls, place = json.JSONDecoder(), list[tuple[str, Any]](), text.find("{")
    while place >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
            calls.append((value["name"], value["parameters"]))
        except (ValueError, KeyError):
            break
        place = text.find("{", place)
    return calls

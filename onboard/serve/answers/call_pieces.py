"""Calls of tools while they are written: their arguments, as far as they have come."""

from __future__ import annotations

import json
import re

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

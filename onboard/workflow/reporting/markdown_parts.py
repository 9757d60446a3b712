"""Markdown in parts that GitHub takes: nothing is cut, and each part is Markdown by itself.

What is open where a part ends (a fence, a folded section, a table) is closed there, and opened again
at the beginning of the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from onboard.render import fenced

MOST_CHARACTERS = 65_536
"""What GitHub takes of a pull request's text and of a comment."""
_HEAD = 400
"""Characters that are kept free for the line that begins a part."""
_FENCE = re.compile(r"(`{3,})")
_FOLDED = re.compile(r"<details><summary>(.*)</summary>$")
_END_FOLDED = "</details>"
MARK = "[AGENT]"
"""What everything that is posted begins with: a program has written it."""


def numbered(text: str, what: str, most: int = MOST_CHARACTERS) -> list[str]:
    """Return `text` in parts of at most `most` characters, each beginning with the mark and, of
    several, its number.

    Args:
        text: Markdown whose fences are of backticks, and whose folded sections begin and end with
            lines of their own.
        what: what it is the text of, for the first line of each part; plain words.
        most: characters of a part, counted in UTF-16 units, which are never fewer than characters.
    """
    parts = list(_Parts(most - _HEAD).of(text))
    count = len(parts)
    if count == 1:
        return [f"{MARK}\n\n{parts[0].text}"]
    return [
        f"{_head(what, number, count, part.goes_on)}\n\n{part.text}"
        for number, part in enumerate(parts, 1)
    ]


def _head(what: str, number: int, count: int, goes_on: bool) -> str:
    line = " Its first line continues the last one of the part before." if goes_on else ""
    return f"{MARK} {what}, part {number} of {count}.{line}"


def length(text: str) -> int:
    """Return the length of a text in UTF-16 units."""
    return len(text.encode("utf-16-le")) // 2


@dataclass
class _Part:
    text: str
    goes_on: bool
    """Its first line of content is the rest of one that was too long for the part before."""


@dataclass
class _Open:
    """What a line stands in."""

    fence: str = ""
    """The line that opened the fence; "" outside."""
    folded: list[str] = field(default_factory=list)
    """Titles of the folded sections, outermost first."""
    table: list[str] = field(default_factory=list)
    """The first two lines of a table."""

    def read(self, line: str) -> None:
        """Take a line into account."""
        found = _FENCE.match(line)
        if self.fence:
            if line == _marks(self.fence):
                self.fence = ""
        elif found:
            self.fence, self.table = line, []
        else:
            self._read_prose(line)

    def _read_prose(self, line: str) -> None:
        if title := _FOLDED.match(line):
            self.folded.append(title[1].removesuffix(" (continued)"))
        elif line == _END_FOLDED:
            self.folded.pop()
        if not line.startswith("|"):
            self.table = []
        elif len(self.table) < 2:
            self.table.append(line)

    def begin(self) -> list[str]:
        """Return the lines that open it again."""
        folded = (
            line
            for title in self.folded
            for line in (f"<details><summary>{title} (continued)</summary>", "")
        )
        return [*folded, *([self.fence] if self.fence else []), *self.table]

    def end(self) -> list[str]:
        """Return the lines that close it."""
        fence = [_marks(self.fence)] if self.fence else []
        return [*fence, *(line for _ in self.folded for line in ("", _END_FOLDED))]


def _marks(fence: str) -> str:
    found = _FENCE.match(fence)
    assert found is not None
    return found[1]


class _Parts:
    """Fills parts line by line."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = _Open()
        self.lines: list[str] = []
        self.size = 0
        self.begun = 0
        """Lines that the part began with to open what was open."""
        self.goes_on = False

    def of(self, text: str) -> Iterator[_Part]:
        """Yield the parts of a text."""
        for line in text.split("\n"):
            if self._has_room(line):
                self._add(line)
                continue
            yield from self._long(line)
        if len(self.lines) > self.begun:
            yield self._part()

    def _long(self, line: str) -> Iterator[_Part]:
        """Put a line into the next part; one that is longer than half a part goes on from part to
        part.

        In prose it is shown as it is written, in a fence, where no part has room for it: there is
        no place to part it.
        """
        if self.open.fence and length(line) > self.most // 2:
            yield from self._cut(line)
            return
        if len(self.lines) > self.begun:
            yield self._next(goes_on=False)
        if self._has_room(line):
            self._add(line)
            return
        for shown in fenced(line).split("\n"):
            yield from self._cut(shown)

    def _cut(self, line: str) -> Iterator[_Part]:
        while not self._has_room(line):
            if (room := self._room()) < self.most // 2 and len(self.lines) > self.begun:
                yield self._next(goes_on=False)
                continue
            start = line.encode("utf-16-le")[: 2 * room].decode("utf-16-le", errors="ignore")
            line = line[len(start) :]
            self._add(start)
            yield self._next(goes_on=True)
        self._add(line)

    def _room(self) -> int:
        return self.most - self.size - sum(length(each) + 1 for each in self.open.end()) - 1

    def _has_room(self, line: str) -> bool:
        # A line that opens something takes the one that closes it, too
        closing = 2 * len(_END_FOLDED) if _FOLDED.match(line) else 0
        closing += len(line) + 1 if _FENCE.match(line) and not self.open.fence else 0
        return length(line) + closing <= self._room()

    def _add(self, line: str) -> None:
        self.lines.append(line)
        self.size += length(line) + 1
        self.open.read(line)

    def _next(self, goes_on: bool) -> _Part:
        part = self._part()
        self.lines = self.open.begin()
        self.begun, self.size = len(self.lines), sum(length(each) + 1 for each in self.lines)
        self.goes_on = goes_on
        return part

    def _part(self) -> _Part:
        return _Part("\n".join([*self.lines, *self.open.end()]), self.goes_on)

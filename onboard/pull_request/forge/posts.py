"""What is posted: it begins with [AGENT], and ends with a mark by which it is found again.

The mark is an HTML comment, the last thing of a post. It says what the post is there for, so that
nothing is posted twice, whatever happened to the program that posted it. Text of others in a post
cannot stand last, and so is never taken for a mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onboard.render import fenced
from onboard.untrusted.visible_text import escaped
from onboard.workflow.reporting.markdown_parts import MARK, MOST_CHARACTERS, numbered

_LAST = re.compile(r"\n<!-- onboard: ([\w ./-]{1,200}) -->\s*\Z")
MOST = MOST_CHARACTERS - 250
"""Characters of a post without its mark."""


@dataclass(frozen=True)
class Post:
    """A comment that is to be there once."""

    mark: str
    body: str


def post(text: str, mark: str) -> list[Post]:
    """Return a text as one comment, or as numbered ones where it is too long for one.

    Args:
        text: Markdown.
        mark: what the post is there for: "answers comment-12".
    """
    return marked(numbered(text, "Comment", MOST), mark)


def log_posts(title: str, about: str, log: str, mark: str) -> list[Post]:
    """Return a log, whole, as comments.

    Args:
        title: what it is the log of.
        about: Markdown before the log.
        log: the text.
        mark: as in `post`.
    """
    text = f"{about}\n\n{fenced(escaped(log))}"
    return marked(numbered(text, title, MOST), mark)


def marked(parts: Sequence[str], mark: str) -> list[Post]:
    """Return texts of at most `MOST` characters, parts of one, as posts."""
    count = len(parts)
    names = [mark if count == 1 else f"{mark} {number}/{count}" for number in range(1, count + 1)]
    return [
        Post(name, f"{part}\n\n<!-- onboard: {name} -->")
        for name, part in zip(names, parts, strict=True)
    ]


def is_agents(body: str) -> bool:
    """Whether a comment says that a program has written it."""
    return body.startswith(MARK)


def mark_of(body: str) -> str:
    """Return the mark at the end of a comment; "" where there is none."""
    found = _LAST.search(body.replace("\r\n", "\n"))
    return found[1] if found and is_agents(body) else ""


def answered(marks: Iterable[str]) -> set[str]:
    """Return the keys of what was answered whole, by the marks of posts."""
    found: dict[str, set[str]] = {}
    for mark in marks:
        words = mark.split()
        if len(words) >= 2 and words[0] == "answers":
            found.setdefault(words[1], set()).add(words[2] if len(words) > 2 else "1/1")
    return {key for key, parts in found.items() if len(parts) == _count(parts)}


def _count(parts: set[str]) -> int:
    return max(int(part.partition("/")[2]) for part in parts)

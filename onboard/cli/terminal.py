"""What a terminal is spared: control characters in text that a model wrote."""

from __future__ import annotations

import re
import sys

# Of the C0 and C1 characters a text needs only these two; ESC begins what a terminal obeys.
_CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """Return a model's text as standard output can take it: a pipe gets it as it is, a terminal
    without commands.
    """
    return escaped(text) if sys.stdout.isatty() else text


def one_line(text: str, most: int = 2000) -> str:
    """Return a text as one line without commands to a terminal; the middle of a very long one is
    left out.
    """
    line = escaped(" ".join(text.split()))
    if len(line) <= most:
        return line
    return f"{line[: most - 500]} [{len(line) - most:,} more characters] {line[-500:]}"


def escaped(text: str) -> str:
    r"""Return a text with control characters, and those that turn its direction, written out:
    \x1b.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)

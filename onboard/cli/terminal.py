"""What a terminal is spared: control characters in text that a model wrote."""

from __future__ import annotations

import sys

from onboard.untrusted.visible_text import escaped


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

"""Markdown as a second implementation reads it (markdown-it, CommonMark): what is code, what is
text that a page would act on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

# What GitHub looks for in text, outside code, once Markdown has become HTML.
LIVE = re.compile(r"@\w|#\d|\bGH-\d|https?://|\bwww\.\w", re.IGNORECASE)


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of blocks, and those inside their lines."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or []


def fences(text: str) -> list[str]:
    """Return the content of each fenced block."""
    return [token.content for token in tokens(text) if token.type == "fence"]


def live(text: str) -> list[str]:
    """Return the pieces of text that GitHub would link, notify or refer to."""
    return [
        token.content
        for token in tokens(text)
        if token.type == "text" and LIVE.search(token.content)
    ]


def html(text: str) -> set[str]:
    """Return the HTML that a page would take as such."""
    return {
        line
        for token in tokens(text)
        if token.type in ("html_block", "html_inline")
        for line in token.content.splitlines()
    }

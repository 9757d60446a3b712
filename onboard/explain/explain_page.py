"""The page of `onboard explain`: Markdown, or HTML made from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from onboard.render import render


def markdown(document: dict[str, Any], root: Path) -> str:
    """Return the page as Markdown; templates of the user's root come first."""
    return render("explain/explain.md.j2", root, **document)


def html(document: dict[str, Any], root: Path) -> str:
    """Return the page as one self-contained HTML file.

    Everything that comes from a model, a config or a record is escaped where the Markdown is made.
    """
    page = MarkdownIt("commonmark").render(markdown(document, root))
    return render("explain/explain.html.j2", root, model=document["model"], page=page)

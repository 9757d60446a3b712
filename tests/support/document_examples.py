"""The files that a document shows, so that tests run what readers copy."""

from __future__ import annotations

import re
from pathlib import Path

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(page: str) -> dict[str, str]:
    """Return the files of a page of `docs`, path -> text: each path stands alone before its
    fence.
    """
    return dict(_FILE.findall((_DOCS / page).read_text("utf-8")))


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files below a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")

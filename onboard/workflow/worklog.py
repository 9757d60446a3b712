"""The worklog of a model, for people and for programs: `worklog.md` and, with the same entries as
JSON documents a line, `worklog.jsonl`. Both are only ever appended to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass
class Worklog:
    """Appends dated entries to `<root>/.onboard/<model>/worklog.md` and `worklog.jsonl`."""

    path: Path | None
    """Of the first; None in a dry run."""

    def append(self, title: str, body: str = "", *, key: str = "", **data: Any) -> None:
        """Append one entry; the time is UTC.

        Args:
            title: its heading.
            body: Markdown.
            key: what it is about; an entry with the key of an earlier one is left out. The line of
                JSON is written first, so that a run that is killed logs nothing twice.
            data: fields of the document, as JSON-able data.
        """
        if self.path is None or (key and any(line.get("key") == key for line in self.entries())):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC)
        known = {"time": now.isoformat(timespec="seconds"), "title": title, "text": body.strip()}
        self._append_line(known | ({"key": key} if key else {}) | data)
        heading = f"## {now:%Y-%m-%d %H:%M:%S} {title}\n\n"
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{heading}{body.strip()}\n\n" if body else heading)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the documents; what a killed run left of a line is none."""
        if self.path is None or not self._lines.is_file():
            return
        for line in self._lines.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict):
                yield document

    @property
    def _lines(self) -> Path:
        assert self.path is not None
        return self.path.with_suffix(".jsonl")

    def _append_line(self, document: dict[str, Any]) -> None:
        with self._lines.open("ab+") as file:
            # Behind what a killed run left of a line
            torn = file.tell() and not _ends_a_line(file)
            file.write(b"\n" * bool(torn) + json.dumps(document).encode() + b"\n")


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, 2)
    ended: bool = file.read(1) == b"\n"
    return ended

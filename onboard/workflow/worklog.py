"""The worklog of a model: a Markdown file that is only ever appended to."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass
class Worklog:
    """Appends dated entries to `<root>/.onboard/<model>/worklog.md`."""

    path: Path | None
    """None in a dry run."""

    def append(self, title: str, body: str = "") -> None:
        """Append one entry; the time is UTC."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(
                f"## {stamp} {title}\n\n{body.strip()}\n\n" if body else f"## {stamp} {title}\n\n"
            )

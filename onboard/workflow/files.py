"""Writing under the root: atomic, recorded, and only shown in a dry run."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class FileWriter:
    """Writes files atomically; with `dry_run` it keeps the new texts and leaves the disk alone."""

    dry_run: bool = False
    pending: dict[Path, str] = field(default_factory=dict)
    """What a dry run would have written."""

    def write(self, path: Path, text: str) -> None:
        """Replace the content of `path` in one step; an equal file is left untouched."""
        if self.dry_run:
            self.pending[path] = text
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)

    def read(self, path: Path) -> str:
        """Return the text that `path` has, or would have in a dry run."""
        return self.pending[path] if path in self.pending else path.read_text(encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Write to a temporary file beside `path`, flush it to the disk and rename it over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

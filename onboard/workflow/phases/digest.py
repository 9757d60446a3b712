"""Hashes of the files that a phase depends on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from onboard.workflow.files import FileWriter


def digest(files: FileWriter, path: Path) -> str | None:
    """Return the sha256 of a file's text, as it is or as a dry run would have written it; None without the file."""
    if path not in files.pending and not path.exists():
        return None
    return hashlib.sha256(files.read(path).encode()).hexdigest()

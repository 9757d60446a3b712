"""Writing under the root: atomic, recorded, and only shown in a dry run."""

from __future__ import annotations

import difflib
import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from onboard.errors import OnboardError


@dataclass
class FileWriter:
    """Writes files atomically; with `dry_run`, or while `held`, it keeps the new texts and leaves the disk alone."""

    dry_run: bool = False
    held: bool = False
    pending: dict[Path, str] = field(default_factory=dict)
    """What is held, or what a dry run would have written."""
    staging: Path | None = None
    """Folder for unfinished files, on the root's file system; None: beside each file."""

    def write(self, path: Path, text: str) -> None:
        """Replace the content of `path` in one step; an equal file is left untouched."""
        if self.dry_run or self.held:
            self.pending[path] = text
        elif not path.exists() or path.read_bytes() != text.encode():
            write_atomically(path, text, staging=self.staging)

    def release(self) -> None:
        """Write what was held."""
        self.held, held, self.pending = False, self.pending, {}
        for path, text in held.items():
            self.write(path, text)

    def read(self, path: Path) -> str:
        """Return the text that `path` has, or is to have."""
        return self.pending[path] if path in self.pending else path.read_text(encoding="utf-8")

    def exists(self, path: Path) -> bool:
        """Tell whether `path` is a file, or is to be one."""
        return path in self.pending or path.is_file()

    def digest(self, path: Path) -> str | None:
        """Return the sha256 of a file's content; None when there is no such file."""
        if path in self.pending:
            return hashlib.sha256(self.pending[path].encode()).hexdigest()
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

    def diff(self, path: Path, root: Path) -> str:
        """Return the unified diff that a pending write amounts to; empty when the file already has that text."""
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
        before = f"a/{name}" if path.is_file() else "/dev/null"
        lines = difflib.unified_diff(
            old.splitlines(), self.pending[path].splitlines(), before, f"b/{name}", lineterm=""
        )
        return "\n".join(lines)


def write_atomically(path: Path, text: str, *, staging: Path | None = None) -> None:
    """Write to a temporary file, flush it to the disk and rename it over `path`.

    The temporary file lies in `staging`, where a killed run's leftovers are found and removed, or beside `path`.
    """
    temporary = (staging or path.parent) / f".{path.name}.{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OnboardError(f"{path} cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)

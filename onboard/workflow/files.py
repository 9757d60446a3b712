"""Writing under the root: atomic, recorded, and only shown in a dry run."""

from __future__ import annotations

import difflib
import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from onboard.errors import OnboardError
from onboard.untrusted.bounds import ARTIFACT_BYTES, read_text


@dataclass(frozen=True)
class Replaced:
    """A file that a user had changed or brought, and that was written anew as asked; `diff` is
    empty in a dry run.
    """

    path: Path
    backup: Path
    diff: str


@dataclass
class FileWriter:
    """Writes files atomically; with `dry_run`, or while `held`, it keeps the new texts and leaves
    the disk alone.
    """

    dry_run: bool = False
    held: bool = False
    pending: dict[Path, str] = field(default_factory=dict)
    """What is held, or what a dry run would have written."""
    staging: Path | None = None
    """Folder for unfinished files, on the root's file system; None: beside each file."""
    root: Path | None = None
    """What the names in `written` are relative to; None: they are absolute."""
    written: dict[str, list[str]] = field(default_factory=dict)
    """Every sha256 that this model's runs `put` a file with, the last one last."""
    written_by_others: Callable[[], dict[str, set[str]]] = dict
    """The same for the runs of all models, read when it is asked for."""
    remember: Callable[[], None] = lambda: None
    """Called when `written` has grown, before the file is there: other runs never see one that no
    run owns up to.
    """
    replacing: bool = False
    """`put` replaces what is not as it was left, and keeps the old file beside the new one."""
    replaced: list[Replaced] = field(default_factory=list)

    def write(self, path: Path, text: str) -> None:
        """Replace the content of `path` in one step; an equal file is left untouched."""
        if self.root is not None:
            check_below(path, self.root)
        if self.dry_run or self.held:
            self.pending[path] = text
        elif not path.exists() or path.read_bytes() != text.encode():
            write_atomically(path, text, staging=self.staging)

    def put(self, path: Path, text: str, *, replacing: bool = False) -> bool:
        """Write a file that users may make their own; return False when it is theirs, and was kept.

        A file that no run wrote, or that was changed since, is a user's. Replacing it, as the
        writer or the caller asks, leaves it beside the new one.
        """
        theirs = self.is_users(path) and self.read(path) != text
        if theirs and not (self.replacing or replacing):
            return False
        if theirs and not self.dry_run:
            self._set_aside(path, text)
        self._own(path, hashlib.sha256(text.encode()).hexdigest())
        self.write(path, text)
        return True

    def claim(self, path: Path) -> None:
        """Take a file for one that this run wrote: it is what the run would write."""
        if (digest := self.digest(path)) is not None:
            self._own(path, digest)

    def is_users(self, path: Path) -> bool:
        """Tell whether a file is there that is not as some run, of whichever model, `put` it."""
        digest, name = self.digest(path), self._name(path)
        if digest is None or digest in self.written.get(name, ()):
            return False
        return digest not in self.written_by_others().get(name, ())

    def is_anothers(self, path: Path) -> bool:
        """Tell whether a file is there that the run of another model `put` after this model's runs
        did.
        """
        last = self.written.get(self._name(path), [])[-1:]
        return self.digest(path) not in (None, *last) and not self.is_users(path)

    def _own(self, path: Path, digest: str) -> None:
        digests = self.written.setdefault(self._name(path), [])
        if digest not in digests[-1:]:
            digests[:] = [*(known for known in digests if known != digest), digest]
            self.remember()

    def _set_aside(self, path: Path, text: str) -> None:
        old = path.read_text(encoding="utf-8")
        backup = path.with_name(f"{path.name}.bak-{hashlib.sha256(old.encode()).hexdigest()[:8]}")
        lines = difflib.unified_diff(
            old.splitlines(),
            text.splitlines(),
            f"{path.name} (kept as {backup.name})",
            path.name,
            lineterm="",
        )
        self.write(backup, old)
        self.replaced.append(Replaced(path, backup, "\n".join(lines)))

    def _name(self, path: Path) -> str:
        below = self.root is not None and path.is_relative_to(self.root)
        return (
            path.relative_to(self.root).as_posix()
            if self.root is not None and below
            else path.as_posix()
        )

    def release(self) -> None:
        """Write what was held."""
        self.held, held, self.pending = False, self.pending, {}
        for path, text in held.items():
            self.write(path, text)

    def read(self, path: Path) -> str:
        """Return the text that `path` has, or is to have."""
        if path in self.pending:
            return self.pending[path]
        try:
            return read_text(path, ARTIFACT_BYTES)
        except UnicodeDecodeError as error:
            raise OnboardError(f"{path} is no UTF-8 text", hint="Restore it") from error

    def exists(self, path: Path) -> bool:
        """Tell whether `path` is a file, or is to be one."""
        return path in self.pending or path.is_file()

    def digest(self, path: Path) -> str | None:
        """Return the sha256 of a file's content; None when there is no such file."""
        if path in self.pending:
            return hashlib.sha256(self.pending[path].encode()).hexdigest()
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

    def diff(self, path: Path, root: Path) -> str:
        """Return the unified diff that a pending write amounts to; empty when the file already has
        that text.
        """
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
        before = f"a/{name}" if path.is_file() else "/dev/null"
        lines = difflib.unified_diff(
            old.splitlines(), self.pending[path].splitlines(), before, f"b/{name}", lineterm=""
        )
        return "\n".join(lines)


def check_below(path: Path, root: Path) -> None:
    """Raise `OnboardError` where a path leads out of a root, by its names or by a link."""
    folder = path.parent.resolve()
    if path.name in ("", "..") or not folder.is_relative_to(root.resolve()):
        raise OnboardError(
            f"{path} leads out of the root {root}", hint="Remove the link, or give another --root"
        )


def write_atomically(path: Path, text: str, *, staging: Path | None = None) -> None:
    """Write to a temporary file, flush it to the disk and rename it over `path`.

    The temporary file lies in `staging`, where a killed run's leftovers are found and removed, or
    beside `path`.
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

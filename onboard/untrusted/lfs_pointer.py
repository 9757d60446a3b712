"""What Git leaves in a large file's place where Git LFS has not fetched it.

Format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md (a text of less than 1024 bytes that
begins with its version).
"""

from __future__ import annotations

from pathlib import Path

from onboard.errors import OnboardError

_VERSION = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raise `OnboardError` for a pointer of Git LFS in the place of a regular file."""
    with path.open("rb") as file:
        if file.read(len(_VERSION)) == _VERSION:
            raise OnboardError(
                f"{path} is a pointer of Git LFS, not the file that it stands for",
                hint=f"Run git lfs pull in {path.parent}",
            )

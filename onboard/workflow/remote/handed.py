"""What a child is given of a model's repository: texts, read here, so that it needs no folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onboard.errors import OnboardError

_SUFFIXES = (".py", ".json")
_MOST_OF_FILE = 2**20
_MOST = 8 * 2**20
"""Bytes of all of them."""


def small_files(folder: Path) -> dict[str, str]:
    """Return relative name -> text of a repository's Python and JSON files of up to 1 MiB.

    A link that leads out of the repository, or of its place in the Hub's cache, is left out: what
    it leads to is not the repository's to read. Bytes that are no UTF-8 become lone surrogates.

    Raises:
        OnboardError: they are too many.
    """
    homes = _homes(folder)
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in _SUFFIXES and _is_small(path) and _is_in(path, homes)
    ]
    if sum(path.stat().st_size for path in paths) > _MOST:
        raise OnboardError(
            f"the model's repository has more than {_MOST >> 20} MiB of code and JSON",
            hint="Onboard a copy with the model's own files alone",
        )
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().decode(errors="surrogateescape")
        for path in paths
    }


def require_inside(folder: Path, names: Iterable[str]) -> None:
    """Raise `OnboardError` for a file of a repository that is a link out of it, which is not handed."""
    homes = _homes(folder)
    for name in names:
        if not _is_in(folder / name, homes):
            raise OnboardError(
                f"{name} of the model's code is a link that leads out of its folder",
                hint="Copy what it leads to into the folder: code of another place is not the repository's",
            )


def _homes(folder: Path) -> list[Path]:
    """Return where the files of a repository may lie."""
    return [folder.resolve(), *_cache(folder)]


def _cache(folder: Path) -> list[Path]:
    """The Hub's cache keeps files apart from the snapshot, which has links to them."""
    if folder.parent.name != "snapshots":
        return []
    return [(folder.parents[1] / "blobs").resolve()]


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= _MOST_OF_FILE


def _is_in(path: Path, homes: list[Path]) -> bool:
    return any(path.resolve().is_relative_to(home) for home in homes)

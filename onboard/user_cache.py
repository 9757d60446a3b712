"""Where what is made once is kept for the next start, and digests of what it was made with."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from onboard.content import CONTENT_ROOT
from onboard.gpu import version

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "ONBOARD_CACHE"
_LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "safetensors",
    "flashinfer-python",
    "flash-linear-attention",
    "xdsl",
)
_SWITCHES = ("TRITON_INTERPRET",)


def user_cache(kind: str) -> Path | None:
    """Return the folder of one kind of files: in ONBOARD_CACHE (empty: nowhere), or in the user's
    cache; None for a user without a home, as containers have.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen is not None:
        return Path(chosen) / kind if chosen else None
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return base / "onboard" / kind if base.is_absolute() else None


def keep(path: Path, content: bytes) -> None:
    """Write a file there, whole or not at all, unless it is there as it should be; where that cannot
    be, the log says so, and it is made again next time.
    """
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        log.warning("%s is not kept: %s", path.name, error)


@cache
def code_digest() -> str:
    """Return the digest of this package's code and of the transforms that ship with it."""
    package = Path(__file__).resolve().parent
    return files_digest(
        sorted([*package.rglob("*.py"), *(CONTENT_ROOT / "transforms").rglob("*.py")])
    )


def files_digest(files: Iterable[Path]) -> str:
    """Return the digest of files: their names and contents, in their order."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def environment() -> dict[str, Any]:
    """Return the versions of the libraries whose code is run, and the variables that change what
    they do.
    """
    return {
        "versions": {name: _version(name) for name in _LIBRARIES}
        | {"python": platform.python_version()},
        "switches": {name: os.environ.get(name) for name in _SWITCHES},
    }


@cache
def _version(library: str) -> str | None:
    """Return what is installed, None where nothing is; to read it takes a third of the time in which
    a kept graph is ready.
    """
    try:
        return version(library)
    except PackageNotFoundError:
        return None

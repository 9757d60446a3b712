"""Folders that stand for models whose own files are in another form: kept in the user's cache, under
the state of what they were made of.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from onboard.user_cache import user_cache


@cache
def kept_folders(kind: str) -> Path:
    """Return where such folders are kept, which may not be there yet; of a user without a cache
    while this process runs.
    """
    if (kept := user_cache(kind)) is not None:
        return kept
    folder = mkdtemp(prefix=f"onboard-{kind}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def name_of_made(files: Iterable[Path], made: Any) -> str:
    """Return the name of a folder that is made of files, and of what has been worked out of them."""
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    parts = [states, made, version("transformers")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def make_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder whose files `fill` writes, all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp(dir=folder.parent))
    try:
        fill(scratch)
        os.rename(scratch, folder)
    except OSError:
        if not folder.is_dir():  # another process was not first either
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

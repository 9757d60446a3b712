"""Where what is made once is kept for the next start."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "ONBOARD_CACHE"


def user_cache(kind: str) -> Path | None:
    """Return the folder of one kind of files: in ONBOARD_CACHE (empty: nowhere), or in the user's cache."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen is not None:
        return Path(chosen) / kind if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "onboard" / kind

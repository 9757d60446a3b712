"""Parts of the program whose libraries are installed only with an extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from onboard.errors import UsageError


def import_extra(module: str, extra: str, needing: str) -> Any:
    """Import a module; raise `UsageError` where a library of its extra is not installed.

    `needing` begins the message: "serving needs", for example.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{needing} {error.name}, which is not installed",
            hint=f"Run: pip install 'onboard[{extra}]'",
        ) from None

"""Calls of Linux that Python has no function for."""

from __future__ import annotations

import ctypes
from functools import cache

NO_NEW_PRIVILEGES = 38
"""An option of prctl(2)."""


@cache
def libc() -> ctypes.CDLL:
    """Return the C library."""
    return ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """Return a call's result; raise `OSError` where it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result

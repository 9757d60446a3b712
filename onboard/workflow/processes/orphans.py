"""A process that works for another one does not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Have this process, just forked by the main thread of `parent`, killed when that one ends
    however it may.

    Linux: prctl(2), PR_SET_PDEATHSIG.
    """
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def exit_with_parent() -> None:
    """End this process when its standard input closes, which is when the process that started it is
    gone.
    """
    # Not through sys.stdin: a thread that still holds its lock when the interpreter ends makes that
    # a fatal error.
    while os.read(0, 1024):
        pass
    os._exit(1)

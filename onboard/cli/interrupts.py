"""An interrupt that nobody heard is sent again.

Python raises `KeyboardInterrupt` wherever the program happens to be. Where that is a finaliser or the
callback of a weak reference (a temporary folder that is removed, a module's lock that is let go) it
goes no further: it is written to stderr as "Exception ignored in", and the program goes on.

See https://docs.python.org/3/library/sys.html#sys.unraisablehook.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

AGAIN = 0.05
"""Seconds after which it is sent again: the finaliser has ended by then."""


def keep_interrupts() -> None:
    """Have interrupts that fall into a finaliser sent to the main thread again."""
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            again = threading.Timer(AGAIN, _interrupt)
            again.daemon = True
            again.start()
        else:
            report(unraisable)

    sys.unraisablehook = hook


def _interrupt() -> None:
    """Interrupt the main thread, out of a system call too, which `signal.raise_signal` would not."""
    main = threading.main_thread().ident
    assert main is not None, "the main thread runs"
    signal.pthread_kill(main, signal.SIGINT)

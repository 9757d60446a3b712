"""Work of someone else's making, such as a chat template's, within seconds and bytes."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_STATM = Path("/proc/self/statm")


@contextmanager
def limited(seconds: float, num_bytes: int) -> Iterator[None]:
    """Raise `TimeoutError` or `MemoryError` inside the block when it takes more of the processor's
    time, or of memory beside what is in use.

    The time is that of the main thread's block alone, the memory is known on Linux alone.
    """
    with ExitStack() as limits:
        if threading.current_thread() is threading.main_thread():
            limits.enter_context(_time(seconds))
        if _STATM.exists():
            limits.enter_context(_memory(num_bytes))
        yield


@contextmanager
def _time(seconds: float) -> Iterator[None]:
    def end(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} seconds")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)  # again, where it was caught and ignored
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _memory(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(_STATM.read_text("ascii").split()[0]) * resource.getpagesize()
    wanted = used + num_bytes
    unlimited = resource.RLIM_INFINITY
    lower = soft if soft != unlimited and soft < wanted else wanted
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

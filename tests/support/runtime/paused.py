"""An engine that stands still, so that what a test does meanwhile is early enough on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onboard.runtime.engine import Engine

SECONDS = 300.0
"""Nothing takes that long on any machine: what has not come by then does not come."""


@contextmanager
def paused(engine: Engine, after: int = 0) -> Iterator[None]:
    """Let the engine make `after` more steps and then none, until the end of the block.

    Its thread goes on to take what callers want: requests come in, and can be cancelled, but what
    runs gets no token and does not end.
    """
    right, left = engine.step, after

    def step() -> Any:
        nonlocal left
        if left > 0:
            left -= 1
            return right()
        return time.sleep(0.001)

    engine.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = right  # type: ignore[method-assign]


def wait_until(holds: Callable[[], object]) -> None:
    """Wait for what other threads bring about; fail if it does not come at all."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)

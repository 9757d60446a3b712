"""Libraries that print what a file says, past Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def silence() -> Iterator[None]:
    """Let nothing that the process writes to its standard streams while the block runs be seen.

    A library in another language may print a hostile file's words as they are, commands to a
    terminal among them. Other threads' output is lost, too.
    """
    with ExitStack() as streams:
        _flush()
        for descriptor in (1, 2):
            streams.enter_context(_to_nowhere(descriptor))
        streams.callback(_flush)
        yield


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


@contextmanager
def _to_nowhere(descriptor: int) -> Iterator[None]:
    try:
        kept = os.dup(descriptor)
    except OSError:  # it is closed: nothing is seen of it
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)

"""What a program that a phase started is at, read off what it prints."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

Tell = Callable[[str], None]

_SECONDS = 0.3
_MOST_BYTES = 1 << 20
_WIDTH = 60
_COUNTED = re.compile(rb"(?:/ |collected )(\d+) (?:items?|selected)")
_ENDED = re.compile(rb" (?:PASSED|FAILED|SKIPPED|ERROR)\b")


@contextmanager
def watched(output: IO[Any], describe: Callable[[bytes], str], tell: Tell) -> Iterator[None]:
    """Tell what `describe` makes of the file's content so far, whenever that changes.

    The file is read beside its writer, from the end that it has now on; nothing is told of what
    `describe` calls "".
    """
    ended, start = threading.Event(), os.fstat(output.fileno()).st_size

    def look() -> None:
        told = ""
        while not ended.wait(_SECONDS):
            text = describe(os.pread(output.fileno(), _MOST_BYTES, start))
            if text and text != told:
                tell(told := text)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def count_of_tests(output: bytes) -> str:
    """Return how many tests a verbose pytest has run, of how many: "12 of 44 tests"."""
    counted = _COUNTED.findall(output)
    return f"{len(_ENDED.findall(output))} of {int(counted[-1])} tests" if counted else ""


def last_line(output: bytes) -> str:
    """Return the last whole line, its spaces joined, cut to what fits beside a spinner."""
    lines = output.rpartition(b"\n")[0].decode("utf-8", errors="replace").splitlines()
    words = " ".join(lines[-1].split()) if lines else ""
    return "".join(each for each in words if each.isprintable())[:_WIDTH]

"""Messages over a pipe: the length in four bytes, then that many bytes."""

from __future__ import annotations

import os

HEADER = 4
MOST = 16 * 2**20
"""Bytes of the largest message."""


def frame(message: bytes) -> bytes:
    """Return a message as it goes over a pipe."""
    assert len(message) <= MOST, "a message that is larger than any that is read"
    return len(message).to_bytes(HEADER, "big") + message


def length_of(header: bytes | bytearray) -> int:
    """Return how long the message behind a header says that it is, in bytes."""
    return int.from_bytes(header[:HEADER], "big")


def write(descriptor: int, message: bytes) -> None:
    """Write a message, waiting as long as it takes."""
    unsent = memoryview(frame(message))
    while unsent:
        unsent = unsent[os.write(descriptor, unsent) :]


def read(descriptor: int) -> bytes | None:
    """Return the next message, waiting as long as it takes; None when the other end is closed."""
    header = _exactly(descriptor, HEADER)
    return None if header is None else _exactly(descriptor, length_of(header))


def _exactly(descriptor: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = os.read(descriptor, min(size - len(data), 2**20))
        if not more:
            return None
        data += more
    return data

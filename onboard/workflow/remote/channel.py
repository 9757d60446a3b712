"""The parent's ends of a child's pipes: nothing here waits past a deadline or keeps without bound."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time

from onboard.errors import OnboardError
from onboard.workflow.remote.frames import HEADER, MOST, frame, length_of

_KEPT_OUTPUT = 4096
_AT_ONCE, _MOST_READS = 2**16, 100


class Channel:
    """Requests to a process's standard input, replies from a pipe, and the last of what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], replies: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._requests, self._replies = process.stdin.fileno(), replies
        self._printed: int | None = process.stdout.fileno()
        self._tail = b""
        for descriptor in (self._requests, replies, self._printed):
            os.set_blocking(descriptor, False)

    def exchange(self, request: bytes, seconds: float) -> bytes:
        """Send a request; return the reply.

        Raises:
            OnboardError: there is none within the time, or the process ends or sends too much.
        """
        deadline = time.monotonic() + seconds
        unsent, reply = memoryview(frame(request)), bytearray()
        while not _is_whole(reply):
            for descriptor, _ in self._ready(unsent, deadline, seconds):
                if descriptor == self._requests:
                    unsent = self._send(unsent)
                elif descriptor == self._printed:
                    self._keep_printed()
                else:
                    reply += self._receive()
        if len(reply) > HEADER + length_of(reply):
            raise _unexpected("more than one reply")
        return bytes(reply[HEADER:])

    def _ready(self, unsent: memoryview, deadline: float, seconds: float) -> list[tuple[int, int]]:
        """Wait for whatever comes first; an empty list when nothing does for a while."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise OnboardError(
                f"the model's code was stopped after {seconds:g} s",
                hint="Read what it does when it is imported",
            )
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        if self._printed is not None:
            poll.register(self._printed, select.POLLIN)
        if unsent:
            poll.register(self._requests, select.POLLOUT)
        return poll.poll(min(left, 1.0) * 1000)

    def _send(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._requests, unsent[:_AT_ONCE]) :]
        except BrokenPipeError:  # it has ended, or reads no more: the reply's pipe says which
            return unsent[:0]

    def _keep_printed(self) -> None:
        assert self._printed is not None
        more = os.read(self._printed, _AT_ONCE)
        self._tail = (self._tail + more)[-_KEPT_OUTPUT:]
        if not more:
            self._printed = None

    def _receive(self) -> bytes:
        more = os.read(self._replies, _AT_ONCE)
        if more:
            return more
        code, shown = _ended(self.process), self.printed()
        raise OnboardError(
            f"the process that ran the model's code ended ({code}) without a result ({shown})"
        )

    def printed(self) -> str:
        """Return the last of what the process printed, as one line of printable characters."""
        for _ in range(_MOST_READS):
            if self._printed is not None and select.select([self._printed], [], [], 0)[0]:
                self._keep_printed()
        words = " ".join(self._tail.decode(errors="replace").split())
        return "".join(letter if letter.isprintable() else "?" for letter in words)[-200:]

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(OSError):
            os.close(self._replies)


def _is_whole(reply: bytearray) -> bool:
    if len(reply) < HEADER:
        return False
    if length_of(reply) > MOST:
        raise _unexpected(f"a reply of {length_of(reply)} bytes")
    return len(reply) >= HEADER + length_of(reply)


def _unexpected(what: str) -> OnboardError:
    return OnboardError(
        f"the process that ran the model's code sent {what}", hint="Do not trust this model"
    )


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process that has closed its pipe; None if it goes on."""
    try:
        return process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        return None

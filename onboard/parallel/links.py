"""Connections between the first rank and the processes of the others."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from onboard.parallel.ranks import LOCAL_RANK, local_rank

_CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


@dataclass(frozen=True)
class Link:
    """The first rank's end of the connection to another rank."""

    rank: int
    connection: Connection
    process: subprocess.Popen[bytes] | None = None
    """None: somebody else has started it, perhaps on another host."""

    def kill(self) -> None:
        """End the process, if it is ours."""
        if self.process is not None:
            self.process.kill()

    def end(self, seconds: float) -> None:
        """Close the connection, which lets the process end; end it after some seconds."""
        self.connection.close()
        if self.process is None:
            return
        try:
            self.process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def how_it_ended(self) -> str:
        """Return what is known of a process whose connection is closed."""
        if self.process is None:
            return "its process has ended"
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its process does not answer"
        if code >= 0:
            return f"its process ended with exit code {code}"
        return f"its process was ended by signal {-code}"


def start_process(rank: int, world_size: int, imports: Sequence[str] = ()) -> Link:
    """Start a rank's process on this host, which imports some modules before it says hello.

    It is no fork, and does not import the main module of this program: scripts need no guard
    around what they do, and this process may have a CUDA context.
    """
    ours, theirs = Pipe()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    own = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // world_size))} | dict(os.environ)
    # What this process was told of itself does not hold for one that it starts, which is beside it
    own[LOCAL_RANK] = str(local_rank(0) + rank)
    package = str(Path(__file__).resolve().parents[2])
    # Where this process finds modules: what is pickled for the other one is found there, too
    own["PYTHONPATH"] = os.pathsep.join([package, *(path for path in sys.path if path)])
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "onboard.parallel.rank_process", str(theirs.fileno()), *imports],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=own,
        )
    return Link(rank, ours, process)


def when_closed(connection: Connection, seconds: float, do: Callable[[], None]) -> None:
    """Call something from a thread, some seconds after the other end of a connection was closed."""
    poll = select.poll()
    poll.register(connection.fileno(), _CLOSED)

    def wait() -> None:
        while not poll.poll():
            pass
        time.sleep(seconds)
        do()

    threading.Thread(target=wait, name="onboard-link", daemon=True).start()

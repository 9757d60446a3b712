"""The process of a rank other than the first: does the jobs that the first one gives it.

Started as `python -m onboard.parallel.rank_process FD`, where FD is an open connection. It ends
with the connection, whatever it is doing.
"""

from __future__ import annotations

import importlib
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from onboard.errors import OnboardError, exit_code
from onboard.parallel.links import when_closed
from onboard.parallel.ranks import join_group

Job = Callable[..., Any]
"""A function of a module: it gets the worker's connection, and what the first rank gave beside it."""
DEBUG = "ONBOARD_DEBUG"
"""The environment variable that has workers print tracebacks."""
_LEAVE = 3.0
"""Seconds that a process may take to end when the first rank has."""


@dataclass(frozen=True)
class Failure:
    """Why a rank has ended, for the user."""

    message: str
    hint: str = ""
    exit_code: int = 1
    may_follow: bool = False
    """Whether it may be no more than what another rank's end has led to."""


def identity() -> dict[str, str]:
    """Return what has to be the same on all ranks."""
    import torch

    from onboard.gpu import version
    from onboard.user_cache import code_digest

    own = f"{version('onboard')} ({code_digest()[:8]})"
    return {"python": platform.python_version(), "torch": torch.__version__, "onboard": own}


def serve(connection: Connection, prepare: Callable[[], None] = lambda: None) -> None:
    """Join the group that the first rank names, and do its jobs until it closes the connection.

    Messages are pairs: ("hello", identity), ("said", what a job says), ("done", what it returns),
    ("failed", error). `prepare` is called before the first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides what ends
    when_closed(connection, _LEAVE, lambda: os._exit(1))
    try:
        prepare()
        connection.send(("hello", identity()))
        join_group(*connection.recv())
        connection.send(("done", None))
        while True:
            job, args = connection.recv()
            connection.send(("done", job(connection, *args)))
    except (EOFError, ConnectionError):
        return
    except BaseException as error:  # whatever it is, the first rank says it
        _tell(connection, error)
        os._exit(exit_code(error))


def _tell(connection: Connection, error: BaseException) -> None:
    if os.environ.get(DEBUG):
        sys.excepthook(type(error), error, error.__traceback__)
    try:
        connection.send(("failed", described(error)))
    except OSError:
        return


def described(error: BaseException) -> Failure:
    """Return what the user is told of an error."""
    import torch

    if isinstance(error, OnboardError):
        return Failure(error.message, error.hint, error.exit_code)
    text = " ".join(str(error).split())[:300]
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Failure(
            f"its memory does not hold its share ({text or 'no memory is left'})",
            "Lower max_batch_size, max_num_tokens or max_seq_len, or use more ranks",
        )
    return Failure(f"{type(error).__name__}: {text}", may_follow=isinstance(error, RuntimeError))


def main() -> None:
    """Serve the connection that the command line names."""

    # What jobs import in their turn: the first rank imports it meanwhile
    def libraries() -> None:
        for name in sys.argv[2:]:
            importlib.import_module(name)

    serve(Connection(int(sys.argv[1])), libraries)
    os._exit(0)  # there is nothing to save, and libraries take their time to end


if __name__ == "__main__":
    # As itself: what it sends is of a module that the first rank knows
    importlib.import_module("onboard.parallel.rank_process").main()

"""Processes that are the ranks of a group (gloo, on the CPU), started once and given one job after
another.

All are forked from one process that has done the imports, which would else take seconds a rank.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onboard.parallel.ranks import Ranks, join_group, leave_group

_IMPORTS = ("tests.support.ranks", "onboard.runtime.build", "transformers.models.auto")
_PATIENCE = 300.0
"""Seconds that a job may take, on a machine that does other things, too."""


@contextmanager
def started(world_size: int) -> Iterator[Group]:
    """Yield a group of ranks, which end with the context."""
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(list(_IMPORTS))
    with tempfile.TemporaryDirectory() as folder:
        address = (Path(folder) / "meet").as_uri()
        pipes = [fork.Pipe() for _ in range(world_size)]
        processes = [
            fork.Process(
                target=_serve, args=(Ranks(rank, world_size), address, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            yield Group([ours for ours, _ in pipes])
        finally:
            for process in processes:
                process.kill()
                process.join()


class Group:
    """The ranks' ends of the pipes."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        self._is_lost = False

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of a module, with the same arguments, on every rank; return what each of
        them returns.

        Raises `AssertionError` with the traceback of the first rank that failed, or did not answer.
        """
        assert not self._is_lost, "an earlier job has not ended on every rank"
        self._is_lost = True
        for pipe in self._pipes:
            pipe.send((job, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_PATIENCE), f"rank {rank} did not answer within {_PATIENCE:.0f} s"
            answers.append(pipe.recv())
        self._is_lost = False
        for rank, (problem, _) in enumerate(answers):
            assert problem is None, f"rank {rank}: {problem}"
        return [result for _, result in answers]


def _serve(ranks: Ranks, address: str, pipe: Connection) -> None:
    join_group(ranks, address, patience=timedelta(seconds=_PATIENCE))
    try:
        while True:
            job, args = pipe.recv()
            pipe.send(_answer(job, args))
    except EOFError:
        leave_group()


def _answer(job: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str | None, Any]:
    try:
        return None, job(*args)
    except BaseException:  # whatever it is, the test shows it
        return traceback.format_exc(), None

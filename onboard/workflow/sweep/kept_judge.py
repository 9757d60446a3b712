"""A judge on several ranks, which takes longer to start than to judge a tiny model: one process
judges a worker's targets one after another, and keeps its ranks.

What it says of a target must not come of those before: an error, of one that has judged others, is
judged again by a new one.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from onboard.workflow.sweep.children import end, exit_code_of, first, fork, print_to_log
from onboard.workflow.sweep.job import Job, confine, read_verdict, run_judge


class KeptJudge:
    """The process, started when it is first needed, and again after it has ended or failed."""

    def __init__(self) -> None:
        self._child: int | None = None
        self._pipe: Connection | None = None
        self._kind: object = None
        self._has_judged = False

    def run(self, job: Job, deadline: float) -> int | None:
        """Have what a job left judged; return 0, the exit code of a judge that ended without a
        word (negative: the signal), or None when the time was over.
        """
        if self._kind != _kind(job):
            self.close()
        again = self._has_judged
        code = self._run(job, deadline)
        return self._run(job, deadline) if again and code is not None and self.is_gone else code

    @property
    def is_gone(self) -> bool:
        """Whether the next target gets a new process."""
        return self._child is None

    def close(self) -> None:
        """End the process and its ranks."""
        if self._child is not None:
            end(self._child)
            self._forget()

    def _run(self, job: Job, deadline: float) -> int | None:
        if self._child is None or self._pipe is None:
            self._start(job)
        assert self._child is not None
        assert self._pipe is not None
        child, pipe = self._child, self._pipe
        with suppress(OSError):  # it ended after the last target, which is heard below
            pipe.send(job)
        heard = first(lambda: _heard(pipe, child), deadline)
        self._has_judged = True
        if isinstance(heard, int):  # it has ended
            self._forget()
            return heard
        verdict = read_verdict(job)
        if heard is None or verdict is None or verdict.error:
            self.close()
        return None if heard is None else 0

    def _start(self, job: Job) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._child, self._kind = fork(job, partial(_serve, connection=theirs)), _kind(job)

    def _forget(self) -> None:
        assert self._pipe is not None
        self._pipe.close()
        self._child, self._pipe, self._kind, self._has_judged = None, None, None, False


def _kind(job: Job) -> object:
    return job.world_size, job.device, job.gibibytes


def _heard(pipe: Connection, child: int) -> str | int | None:
    """Return the word of a judge that is done, the exit code of one that has ended, or None."""
    if pipe.poll():
        with suppress(EOFError, ConnectionError):
            return str(pipe.recv())
    return exit_code_of(child)


def _serve(job: Job, connection: Connection) -> None:
    """Judge the jobs that come until this process is ended; `job` is the first of them."""
    from onboard.runtime.ranks.leading import kept_workers

    confine(job)
    gc.freeze()  # what all targets have need not be looked at after each
    with kept_workers(job.world_size, job.device):
        while True:
            job = connection.recv()
            print_to_log(job)
            run_judge(job)
            gc.collect()
            connection.send("done")

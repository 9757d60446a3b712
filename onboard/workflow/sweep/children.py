"""Processes that a worker forks, each in a group of its own: bounded in time, and ended with the
worker.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from onboard.workflow.processes.orphans import die_with
from onboard.workflow.sweep.job import LOG, Job

T = TypeVar("T")
ENDING = (signal.SIGTERM, signal.SIGINT)
_POLL = 0.05
_children: set[int] = set()
"""Those that are running: what ends the worker ends them, too."""


def end_all(*_: object) -> None:
    """End with the children, at once: an exception that is raised while a finalizer runs would be
    dropped.
    """
    for child in _children:
        _kill_group(child)
    os._exit(1)


def fork(job: Job, work: Callable[[Job], None]) -> int:
    """Start a child in a process group of its own, which what it starts is in as well."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # no child that `_children` does not know of
    parent, child = os.getpid(), os.fork()
    if child:
        _children.add(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        return child
    code = 1
    try:
        os.setsid()
        die_with(parent)
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        print_to_log(job)
        work(job)
        code = 0
    except BaseException:  # the worker's code must not go on in here
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def print_to_log(job: Job) -> None:
    """Have all that this process prints from now on, and that it starts prints, be in a job's log."""
    log = os.open(job.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, stream)
    os.close(log)
    os.close(nothing)


def wait(child: int, deadline: float) -> int | None:
    """Return the child's exit code (negative: the signal), or None when the time was over; its
    group ends with it.
    """
    code = first(lambda: exit_code_of(child), deadline)
    if code is None:
        end(child)
    return code


def first(found: Callable[[], T | None], deadline: float) -> T | None:
    """Return the first thing that is found, or None when the time is over.

    Without the process that wants the answer this one ends as well.
    """
    parent = os.getppid()
    while (result := found()) is None and time.monotonic() < deadline:
        time.sleep(_POLL)
        if os.getppid() != parent:
            end_all()
    return result


def exit_code_of(child: int) -> int | None:
    """Return the exit code of a child that has ended, which nobody can ask for again."""
    pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        return None
    _children.discard(child)
    return os.waitstatus_to_exitcode(status)


def end(child: int) -> None:
    """End a child and what it started."""
    _kill_group(child)
    os.waitpid(child, 0)
    _children.discard(child)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its group yet
        os.kill(leader, signal.SIGKILL)

"""One watcher of a pull request at a time; others are told who it is."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from onboard.config import StrictModel
from onboard.errors import OnboardError
from onboard.pull_request.pull_journal import now
from onboard.workflow.files import write_atomically

_LOCK, _WHO = "pull_request_watch.lock", "pull_request_watch.json"
_PATIENCE = 0.3
"""Seconds; who asks whether somebody watches holds the lock for a moment."""


class Watcher(StrictModel):
    """A process that watches."""

    pid: int
    host: str
    since: str


@contextmanager
def watching(work_dir: Path) -> Iterator[None]:
    """Be the one watcher; the system gives the lock back however the process ends.

    Raises:
        OnboardError: another process watches.
    """
    lock = FileLock(work_dir / _LOCK)
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout:
        other = _noted(work_dir)
        who = f"process {other.pid} on {other.host}, since {other.since}" if other else "a process"
        raise OnboardError(f"{who} watches this pull request already") from None
    try:
        me = Watcher(pid=os.getpid(), host=platform.node(), since=now())
        write_atomically(work_dir / _WHO, me.model_dump_json() + "\n")
        yield
    finally:
        (work_dir / _WHO).unlink(missing_ok=True)
        lock.release()


def current_watcher(work_dir: Path) -> Watcher | None:
    """Return who watches now; None where nobody does."""
    if not (work_dir / _LOCK).exists():
        return None
    try:
        with FileLock(work_dir / _LOCK, timeout=0):
            return None
    except Timeout:
        return _noted(work_dir)


def _noted(work_dir: Path) -> Watcher | None:
    try:
        return Watcher.model_validate_json((work_dir / _WHO).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

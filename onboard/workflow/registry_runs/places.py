"""Where entries run: a GPU each, or one for each rank, chosen among the free ones through NVML, or one of a number of
places on the CPU.

A GPU that a run has taken is locked, so that another run of the registry beside this one takes
another.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from onboard.gpu import free_gpus
from onboard.user_cache import user_cache

POLL_SECONDS = 5.0


@dataclass
class Place:
    """Somewhere that one process may run, until it is left."""

    environment: dict[str, str]
    leave: Callable[[], None]


class Places(Protocol):
    """What gives out places."""

    def take(self, waiting: Callable[[str], None], stopped: threading.Event) -> Place | None:
        """Return a place when there is one, telling `waiting` why there is none yet; None when
        `stopped`.
        """


@dataclass
class CpuPlaces:
    """As many places as threads ask for: each thread runs one process."""

    def take(self, waiting: Callable[[str], None], stopped: threading.Event) -> Place | None:
        """Return a place from which no GPU is seen."""
        return None if stopped.is_set() else Place({"CUDA_VISIBLE_DEVICES": ""}, lambda: None)


@dataclass
class GpuPlaces:
    """The machine's free GPUs, some for each process."""

    folder: Path = field(
        default_factory=lambda: user_cache("gpus") or Path(tempfile.gettempdir()) / "onboard-gpus"
    )
    """Where the locks are."""
    poll_seconds: float = POLL_SECONDS
    each: int = 1
    """How many GPUs a process gets."""

    def take(self, waiting: Callable[[str], None], stopped: threading.Event) -> Place | None:
        """Return GPUs whose memory is free and that no other run has taken; look again until there
        are enough.
        """
        told = False
        while not stopped.is_set():
            free = free_gpus()
            if place := self._place(free):
                return place
            if not told:
                waiting(self._why(len(free)))
                told = True
            stopped.wait(self.poll_seconds)
        return None

    def _place(self, free: Sequence[int]) -> Place | None:
        """Return so many of the free GPUs as a process gets; none is kept where these are fewer."""
        taken: dict[int, FileLock] = {}
        for index in free:
            if len(taken) < self.each and (lock := self._lock(index)) is not None:
                taken[index] = lock
        if len(taken) < self.each:
            _release(taken.values())
            return None
        environment = {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, taken)),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        return Place(environment, partial(_release, taken.values()))

    def _why(self, free: int) -> str:
        """Return why there is no place, of GPUs so many of which have free memory."""
        wanted = "no free GPU" if self.each == 1 else f"fewer than {self.each} free GPUs"
        taken = "all of them" if self.each == 1 else "some of them"
        return f"{wanted} ({free} have free memory, {taken} taken by other runs of the registry)"

    def _lock(self, index: int) -> FileLock | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / f"{index}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return None
        return lock


def _release(locks: Iterable[FileLock]) -> None:
    for lock in locks:
        lock.release()

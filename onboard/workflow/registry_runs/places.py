"""Where entries run: a GPU each, chosen among the free ones through NVML, or one of a number of
places on the CPU.

A GPU that a run has taken is locked, so that another run of the registry beside this one takes
another.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """The machine's free GPUs."""

    folder: Path = field(
        default_factory=lambda: user_cache("gpus") or Path(tempfile.gettempdir()) / "onboard-gpus"
    )
    """Where the locks are."""
    poll_seconds: float = POLL_SECONDS

    def take(self, waiting: Callable[[str], None], stopped: threading.Event) -> Place | None:
        """Return a GPU whose memory is free and that no other run has taken; look again until there
        is one.
        """
        told = False
        while not stopped.is_set():
            free = free_gpus()
            for index in free:
                if (lock := self._lock(index)) is not None:
                    environment = {
                        "CUDA_VISIBLE_DEVICES": str(index),
                        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                    }
                    return Place(environment, lock.release)
            if not told:
                waiting(
                    f"no free GPU ({len(free)} have free memory, all of them taken by other runs of the registry)"
                )
                told = True
            stopped.wait(self.poll_seconds)
        return None

    def _lock(self, index: int) -> FileLock | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / f"{index}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return None
        return lock

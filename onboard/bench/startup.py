"""From the start of the process to the first token: which stage took how long."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from onboard.graph.context import HistoryEntry

_IMPORTED = time.monotonic()


@dataclass(frozen=True)
class Span:
    """One stage; seconds since the process began."""

    name: str
    start: float
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of what it consists of, where that is known: of each transform of a stage."""


@dataclass
class StartUp:
    """The stages of a start, one after the other."""

    spans: list[Span] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Seconds from the start of the process to the end of the last stage."""
        return max((span.start + span.seconds for span in self.spans), default=0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record what the block takes."""
        start = since_start()
        yield
        self.spans.append(Span(name, start, since_start() - start))

    def built(self, start: float, history: Sequence[HistoryEntry]) -> None:
        """Record a build that began at `start` and ends now: what came before its pipeline, and the
        stages of that.
        """
        at = max(start, since_start() - sum(entry.seconds for entry in history))
        self.spans.append(Span("config and files", start, at - start))
        self.spans.extend(_stages(history, at))


def _stages(history: Iterable[HistoryEntry], at: float) -> Iterator[Span]:
    """Yield the stages; one that is left and entered again has the name of what takes longest each
    time.
    """
    visits = [
        (stage, _parts(entries))
        for stage, entries in groupby(history, key=lambda entry: entry.stage)
    ]
    often = Counter(stage for stage, _ in visits)
    for stage, parts in visits:
        name = stage if often[stage] == 1 else f"{stage}: {max(parts, key=lambda key: parts[key])}"
        yield Span(name, at, sum(parts.values()), parts)
        at += sum(parts.values())


def _parts(entries: Iterable[HistoryEntry]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for entry in entries:
        parts[entry.key] = parts.get(entry.key, 0.0) + entry.seconds
    return parts


def since_start() -> float:
    """Return the seconds since this process began; where the system does not say, since this module
    was imported.
    """
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.monotonic() - _IMPORTED
    ticks = int(stat.read_text("ascii", errors="replace").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")

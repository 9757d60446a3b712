"""Progress of a sweep on stderr: a live table on a terminal, one plain line a target otherwise."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from onboard.workflow.sweep.target_record import Entry

_STYLES = {
    "pass": "green",
    "wrong": "bold red",
    "prefill": "cyan",
    "fail": "red",
    "refused": "yellow",
    "timeout": "magenta",
    "crash": "bold red",
}
_SHOWN = 12


class SweepProgress(Protocol):
    """Who is told about targets."""

    def started(self, name: str) -> None:
        """A target begins."""

    def finished(self, entry: Entry, ran: bool) -> None:
        """A target ended; `ran`: now, not before."""


@contextmanager
def sweep_progress(total: int) -> Iterator[SweepProgress]:
    """Yield the progress that suits stderr."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield PlainSweep(total)
        return
    table = LiveSweep(total)
    with Live(table, console=console, refresh_per_second=4):
        yield table


@dataclass
class PlainSweep:
    """Writes a line for each target that ended."""

    total: int
    done: int = 0

    def started(self, name: str) -> None:
        """A log shows what ended, not what began."""

    def finished(self, entry: Entry, ran: bool) -> None:
        """Write the target's line."""
        self.done += 1
        print(f"[{self.done}/{self.total}] {describe(entry, ran)}", file=sys.stderr, flush=True)


def describe(entry: Entry, ran: bool) -> str:
    """Return an entry as one line."""
    took = f"{entry.seconds:.1f} s" if ran else "unchanged"
    return f"{entry.label}: {entry.status}, {took}{': ' + entry.reason if entry.reason else ''}"


@dataclass
class LiveSweep:
    """Counts by status, what runs, and the last targets that ended."""

    total: int
    counts: Counter[str] = field(default_factory=Counter)
    running: list[str] = field(default_factory=list)
    last: list[tuple[Entry, bool]] = field(default_factory=list)

    def started(self, name: str) -> None:
        """Show that it runs."""
        self.running.append(name)

    def finished(self, entry: Entry, ran: bool) -> None:
        """Move it to the table."""
        self.running = [name for name in self.running if name != entry.label]
        self.counts[entry.status] += 1
        self.last = [*self.last, (entry, ran)][-_SHOWN:]

    def __rich__(self) -> RenderableType:
        table = Table("model", "status", "passed up to", "seconds", "reason", expand=True)
        for entry, ran in self.last:
            seconds = f"{entry.seconds:.1f}" if ran else "unchanged"
            reason = Text(entry.reason, no_wrap=True, overflow="ellipsis")
            status = Text(entry.status, style=_STYLES.get(entry.status, "dim"))
            table.add_row(Text(entry.label), status, entry.level.replace("_", " "), seconds, reason)
        counts = ", ".join(f"{status} {count}" for status, count in sorted(self.counts.items()))
        done = sum(self.counts.values())
        return Group(
            table,
            Text(
                f"{done} of {self.total}: {counts or 'nothing yet'}; now {', '.join(self.running)}"
            ),
        )

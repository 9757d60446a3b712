"""Progress on stderr: a spinner and the time on a terminal, one plain line a phase otherwise."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from onboard.cli.terminal import one_line
from onboard.untrusted.visible_text import escaped

if TYPE_CHECKING:
    from rich.progress import Progress

    from onboard.workflow.outcome import PhaseOutcome
    from onboard.workflow.phase_runner import Observer

_STYLES = {
    "done": "green",
    "skipped": "dim",
    "planned": "cyan",
    "failed": "red",
    "interrupted": "yellow",
}


def observer() -> Observer:
    """Return the observer that suits stderr."""
    console = Console(stderr=True, highlight=False)
    return TerminalObserver(console) if console.is_terminal else PlainObserver()


@dataclass
class PlainObserver:
    """Writes one line for each phase that ended."""

    def waiting(self) -> None:
        """Say why nothing happens."""
        print("waiting for another run of this model", file=sys.stderr)

    def started(self, name: str) -> None:
        """A log shows what ended, not what began."""

    def doing(self, text: str) -> None:
        """Nor what is on its way."""

    def finished(self, outcome: PhaseOutcome) -> None:
        """Write the phase's line."""
        print(describe(outcome), file=sys.stderr, flush=True)


@dataclass
class TerminalObserver:
    """Shows the phase that runs and for how long, above it those that ended."""

    console: Console
    phase: str = field(default="", init=False)
    spinner: Progress | None = field(default=None, init=False)

    def waiting(self) -> None:
        """Say why nothing happens."""
        self._spin("waiting for another run of this model")

    def started(self, name: str) -> None:
        """Show the phase's name."""
        self.phase = name
        self._spin(name)

    def doing(self, text: str) -> None:
        """Show it beside the phase's name."""
        if self.spinner is not None:
            self.spinner.update(
                self.spinner.task_ids[0], description=escape(f"{self.phase}: {escaped(text)}")
            )

    def finished(self, outcome: PhaseOutcome) -> None:
        """Replace the spinner by the phase's line."""
        self._stop()
        self.console.print(describe(outcome), style=_STYLES[outcome.status], markup=False)

    def _spin(self, text: str) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._stop()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.spinner = Progress(*columns, console=self.console, transient=True)
        self.spinner.add_task(text, total=None)
        self.spinner.start()

    def _stop(self) -> None:
        if self.spinner is not None:
            self.spinner.stop()
            self.spinner = None


def describe(outcome: PhaseOutcome) -> str:
    """Return a phase's line: name, fate, time and what it says of itself.

    An error is left out: it is the command's last line.
    """
    took = f" in {outcome.seconds:.1f} s" if outcome.status in ("done", "failed") else ""
    summary = f": {one_line(outcome.summary)}" if outcome.summary else ""
    return f"{outcome.name:<12} {outcome.status}{took}{summary}"

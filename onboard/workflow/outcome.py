"""What a run of the workflow came to: for the terminal, and as the one document of `--json`."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from onboard.errors import OnboardError, exit_code

PhaseStatus = Literal["done", "skipped", "planned", "failed", "interrupted"]


@dataclass
class PhaseOutcome:
    """What happened to one phase; `artifacts` are name -> path relative to the root."""

    name: str
    status: PhaseStatus
    seconds: float = 0.0
    summary: str = ""
    error: str = ""
    artifacts: dict[str, str] = field(default_factory=dict)
    exception: BaseException | None = None

    def story(self) -> str:
        """Return the worklog's text about the phase, with the traceback of a defect."""
        lines = [
            self.summary,
            self.error,
            *(f"- {name}: {path}" for name, path in self.artifacts.items()),
        ]
        if self.exception is not None and not isinstance(self.exception, OnboardError):
            lines += ["```", *traceback.format_exception(self.exception), "```"]
        return "\n".join(line for line in lines if line)

    def document(self) -> dict[str, Any]:
        """Return the phase as JSON-able data for the worklog."""
        seconds = round(self.seconds, 3)
        return {"phase": self.name, "status": self.status, "seconds": seconds} | {
            "artifacts": self.artifacts
        }


@dataclass
class RunOutcome:
    """What happened to a model."""

    model: str
    root: Path
    phases: list[PhaseOutcome] = field(default_factory=list)

    @property
    def status(self) -> Literal["done", "failed", "interrupted"]:
        """The last phase's fate, which is the run's: the first failure ends it."""
        last = self.phases[-1].status if self.phases else "done"
        return last if last in ("failed", "interrupted") else "done"

    @property
    def exception(self) -> BaseException | None:
        """What ended the run, if it did not come to its end."""
        return self.phases[-1].exception if self.phases else None

    @property
    def exit_code(self) -> int:
        """What the command exits with."""
        return exit_code(self.exception)

    def document(self) -> dict[str, Any]:
        """Return the run as JSON-able data; artifacts are absolute paths."""
        phases = [self._phase(outcome) for outcome in self.phases]
        artifacts = {name: path for phase in phases for name, path in phase["artifacts"].items()}
        return {
            "model": self.model,
            "status": self.status,
            "phases": phases,
            "artifacts": artifacts,
        }

    def _phase(self, outcome: PhaseOutcome) -> dict[str, Any]:
        return {
            "name": outcome.name,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 3),
            "artifacts": {name: str(self.root / path) for name, path in outcome.artifacts.items()},
            "error": outcome.error or None,
        }

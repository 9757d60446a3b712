"""What became of each role's run: `agents.json` in a model's work folder, and a transcript of each,
a JSON document a line.

A run that was stopped goes on where it was: with its attempts counted, its costs and what it was
told. One that has ended is not asked again while its inputs are the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from onboard.agents.role_settings import RoleName
from onboard.config import StrictModel
from onboard.errors import OnboardError

RECORDS = "agents.json"
TRANSCRIPTS = "agents"
"""Folder of the transcripts."""
_HIDDEN = "[hidden]"
_SHORTEST_SECRET = 6


class RoleRun(StrictModel):
    """One role's run: what it was about, what it took, what came of it."""

    role: RoleName
    back_end: str
    about: str
    """What it is asked for, in a line."""
    input_hash: str
    status: Literal["running", "done", "failed", "interrupted"] = "running"
    """interrupted: shown of one that runs no longer, and never written."""
    waits_for: str = ""
    """Whom or what it waits for while it runs."""
    attempts: int = 0
    refusals: list[str] = Field(default_factory=list)
    """Why each answer but the last was not taken; the agent is told."""
    tokens: int = 0
    cost: float = 0.0
    estimated: bool = False
    """The tokens are an estimate: the back end does not count them."""
    seconds: float = 0.0
    before: str = ""
    """What was wrong."""
    after: str = ""
    """What the tests said of what was kept."""
    diff: str = ""
    """What was kept, to be shown."""
    files: dict[str, str] = Field(default_factory=dict)
    """The files that were kept."""
    answer: dict[str, Any] | None = None
    """The answer of a role that changes no file."""
    transcript: str = ""
    """The transcript's name in the work folder; "" where nobody was asked."""
    world_size: int | None = None
    """GPUs that the runner's model runs on."""
    gpus: list[str] = Field(default_factory=list)
    """Which they are; none on a CPU."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON-able data for showing, without the texts of whole files."""
        return self.model_dump(mode="json", exclude={"files"}, warnings=False)


@dataclass
class Records:
    """The runs of a model's roles, kept in its work folder."""

    folder: Path
    write: Callable[[Path, str], None]
    """Replaces a file's content in one step."""
    runs: list[RoleRun] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path, write: Callable[[Path, str], None]) -> Records:
        """Return what is recorded in a work folder."""
        return cls(folder, write, load_runs(folder))

    def open(self, run: RoleRun) -> RoleRun:
        """Return the recorded run of the same role and inputs, or this one, recorded now."""
        for known in self.runs:
            if (known.role, known.input_hash) == (run.role, run.input_hash):
                return known
        self.runs.append(run)
        count = sum(known.role == run.role for known in self.runs)
        run.transcript = f"{TRANSCRIPTS}/{run.role}-{count}.jsonl"
        self.save()
        return run

    def save(self) -> None:
        """Write all of them."""
        data = [run.model_dump(mode="json") for run in self.runs]
        text = json.dumps({"runs": data}, indent=2, ensure_ascii=False) + "\n"
        self.write(self.folder / RECORDS, text)


def load_runs(folder: Path) -> list[RoleRun]:
    """Return the recorded runs of a work folder.

    Raises:
        OnboardError: the file is not a record of this version.
    """
    path = folder / RECORDS
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [RoleRun.model_validate(each) for each in data["runs"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, ValidationError, OnboardError) as error:
        raise OnboardError(
            f"{path} is not a record of this version", hint="Remove it; the agents are asked again"
        ) from error


@dataclass
class Transcript:
    """Appends what happens to a file, a JSON document a line, without the secrets that it knows."""

    path: Path
    secrets: Iterable[str] = ()

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event; the time is UTC."""
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"time": stamp, "event": kind, **data}, ensure_ascii=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(hidden(line, self.secrets) + "\n")


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Return a text with the secrets taken out."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, _HIDDEN)
            text = text.replace(json.dumps(secret, ensure_ascii=False)[1:-1], _HIDDEN)
    return text


@dataclass
class Clock:
    """Adds the seconds of a block to a run."""

    run: RoleRun
    started: float = 0.0

    def __enter__(self) -> Clock:
        self.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.run.seconds = round(self.run.seconds + time.monotonic() - self.started, 3)

"""The state of a model's run: what each phase was given, what it left, and whether that still
holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onboard.errors import OnboardError

Status = Literal["running", "done", "failed", "interrupted"]
STATE_FILE = "state.json"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Artifact(_Record):
    """A file that a phase wrote, relative to the root, and the sha256 of its content then."""

    path: str
    sha256: str | None = None


class PhaseRecord(_Record):
    """The last run of one phase."""

    status: Status
    input_hash: str
    seconds: float = 0.0
    summary: str = ""
    error: str = ""
    artifacts: dict[str, Artifact] = Field(default_factory=dict)


class RunState(_Record):
    """The content of `<root>/.onboard/<model>/state.json`."""

    schema_version: Literal[1] = 1
    model: str
    versions: dict[str, str] = Field(default_factory=dict)
    phases: dict[str, PhaseRecord] = Field(default_factory=dict)
    written: dict[str, list[str]] = Field(default_factory=dict)
    """Every sha256 that this model's runs wrote a file with, by its path relative to the root; the
    last one last.
    """

    @classmethod
    def load(cls, work_dir: Path, model: str) -> RunState:
        """Return the recorded state, or a fresh one when nothing ran yet."""
        path = work_dir / STATE_FILE
        try:
            state = cls.model_validate_json(path.read_text(encoding="utf-8"))
            return state if "written" in state.model_fields_set else state._with_what_phases_left()
        except FileNotFoundError:
            return cls(model=model)
        except (ValidationError, ValueError, OSError) as error:
            raise OnboardError(
                f"{path} is not a state of this version", hint="Run with --fresh to start over"
            ) from error

    def _with_what_phases_left(self) -> RunState:
        """Return the state of a release that did not say what it wrote: all but a config, which it
        may have kept.
        """
        artifacts = [item for phase in self.phases.values() for item in phase.artifacts.items()]
        left = {
            made.path: [made.sha256] for name, made in artifacts if name != "config" and made.sha256
        }
        return self.model_copy(update={"written": left})

    def at_rest(self) -> RunState:
        """Return the state for showing when nothing runs: what it says to be running was
        interrupted.
        """
        stopped = {
            name: record.model_copy(update={"status": "interrupted"})
            if record.status == "running"
            else record
            for name, record in self.phases.items()
        }
        return self.model_copy(update={"phases": stopped})

    def text(self) -> str:
        """Return the state as JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def written_under(folder: Path) -> dict[str, set[str]]:
    """Return every digest that the runs of all models, each with a folder in `folder`, left a file
    with, by path.
    """
    digests: dict[str, set[str]] = {}
    for path in folder.glob(f"*/{STATE_FILE}"):
        try:
            written = RunState.load(path.parent, "").written
        except OnboardError:  # said to whoever runs that model
            continue
        for name, found in written.items():
            digests.setdefault(name, set()).update(found)
    return digests


def hash_inputs(inputs: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Return the sha256 of a phase's inputs together with the versions of the tool and its
    libraries.
    """
    text = json.dumps({"inputs": inputs, "versions": versions}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def current_versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    from onboard import __version__
    from onboard.gpu import version

    return {"onboard": __version__, **{name: version(name) for name in ("torch", "transformers")}}

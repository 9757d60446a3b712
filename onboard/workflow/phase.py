"""What a phase is and what phases share.

Phases talk to each other only through files: artifacts in the work folder and content files under
the root. So a resumed run needs nothing but the state file and those.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from onboard.agents.role_settings import AgentsSettings
from onboard.analysis.spec import ModelSpec
from onboard.config import DType, StrictModel
from onboard.workflow.processes.programs import RunModule, in_new_interpreter
from onboard.workflow.processes.watched import Tell

if TYPE_CHECKING:
    from onboard.hub import ModelSource
    from onboard.workflow.files import FileWriter
    from onboard.workflow.worklog import Worklog


class RunOptions(StrictModel):
    """The command line options that phases read."""

    revision: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DType = "auto"
    trust_remote_code: bool = False
    unsandboxed: bool = False
    """Run that code even where the system lacks walls around it."""
    yes: bool = False
    """The user's consent, given in advance (does not fit in memory)."""
    offline: bool = False
    strict: bool = False
    """A fallback of the full run is an error."""
    dry_run: bool = False
    agents: AgentsSettings = Field(default_factory=AgentsSettings)
    """Who plays which role; the rules where nothing is said."""
    weights: bool = False
    """Fetch the weights at once: a later phase of this run needs them."""


def _nothing_to_warm() -> None:
    """Programs have interpreters of their own."""


def _to_nobody(_: str) -> None:
    """Whoever runs a phase by itself does not watch it."""


@dataclass
class RunContext:
    """One run of the workflow for one model."""

    model: str
    """A local folder's absolute path, or an id."""
    root: Path
    work_dir: Path
    """`<root>/.onboard/<model>`."""
    options: RunOptions
    files: FileWriter
    """Every write under the root goes through it: atomic, recorded, and only shown in a dry run."""
    worklog: Worklog
    source: ModelSource
    """Where the model's files are (`onboard.hub`): a local folder, the cache or a Hub; weights on
    demand.
    """
    run_module: RunModule = in_new_interpreter
    """How phases start programs of Python."""
    warm_up: Callable[[], None] = _nothing_to_warm
    """Called before the libraries are needed, here and in programs that will be started in a
    while.
    """
    doing: Tell = _to_nobody
    """Hears what the phase that runs is at."""

    def artifact(self, name: str) -> Path:
        """Return the path of an artifact in the work folder."""
        return self.work_dir / name

    def read_json(self, name: str) -> Any:
        """Read a JSON artifact that an earlier phase wrote."""
        return json.loads(self.files.read(self.artifact(name)))

    def write_json(self, name: str, data: Any) -> Path:
        """Write a JSON artifact."""
        path = self.artifact(name)
        self.files.write(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        return path

    def digest(self, *names: str) -> dict[str, str | None]:
        """Return the sha256 of artifacts by name (None: not there), for a phase's `inputs`."""
        return {name: self.files.digest(self.artifact(name)) for name in names}

    def digest_of(self, *paths: str) -> dict[str, str | None]:
        """Return the sha256 of files under the root by path (None: not there), for what is made
        with them.
        """
        return {path: self.files.digest(self.root / path) for path in paths}

    def kept(self, path: Path, phase: str) -> str:
        """Return the words for a user's file that a phase left as it is."""
        way = f"--from {phase} shows the diff and replaces it"
        return f"kept {self.relative(path)}, which is not as onboard wrote it ({way})"

    def relative(self, path: Path) -> str:
        """Return a path below the root as artifacts list it."""
        return path.relative_to(self.root).as_posix()

    @property
    def spec(self) -> ModelSpec:
        """The model's spec, as the analyze phase wrote it or the user edited it."""
        return ModelSpec.from_yaml(self.files.read(self.artifact("spec.yaml")))


@dataclass
class PhaseResult:
    """What a phase left behind."""

    artifacts: dict[str, str] = field(default_factory=dict)
    """Name -> path, relative to the root."""
    summary: str = ""
    """One line for the terminal."""


class Phase(ABC):
    """One step of the workflow."""

    name: ClassVar[str]
    editable: ClassVar[frozenset[str]] = frozenset()
    """Artifacts that the user may change: only their absence, not a new content, reruns the phase.
    Where the phase has to run again for other reasons, an edited one is not overwritten unasked."""
    shared: ClassVar[frozenset[str]] = frozenset()
    """Artifacts that the runs of a family's models write for each other: what another of them left
    reruns nothing.
    """
    merged: ClassVar[frozenset[str]] = frozenset()
    """Artifacts that the runs of all models add to. Only their absence reruns the phase, which
    never overwrites what others put there."""
    judges_input: ClassVar[bool] = False
    """The phase may find that the model cannot be onboarded at all. Until the last such phase of a
    run has passed, all writes are held back: bad input changes no file."""
    needs_weights: ClassVar[bool] = False
    """The phase reads the checkpoint's weights."""
    starts_programs: ClassVar[bool] = False
    """The phase starts programs of Python, which import the libraries."""

    @abstractmethod
    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Return what the result depends on, as JSON-able data (file contents as hashes): equal
        inputs, no rerun.
        """

    @abstractmethod
    def run(self, context: RunContext) -> PhaseResult:
        """Do the work; raise `OnboardError` on failure."""

"""The roles: what each is told, what it may answer, and the brief that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onboard.agents.answers import (
    Answer,
    PortAnswer,
    RepairAnswer,
    ReviewAnswer,
    RunAnswer,
    schema_of,
)
from onboard.agents.role_settings import RoleName
from onboard.config import StrictModel
from onboard.render import render


class Task(StrictModel):
    """What a role is told."""

    @property
    def about(self) -> str:
        """The task in a line."""
        raise NotImplementedError


class RepairTask(Task):
    """The first block that differs, with both sources and both values."""

    model: str
    model_file: str
    spec_file: str
    """Paths of what may be changed."""
    place: str
    """The module's path, or the weight's."""
    block: str
    """The class of the model file in which the fault shows first."""
    problem: str
    """What differs, with both values."""
    ours: str
    """The class as the model file has it."""
    theirs: str
    """The same class of transformers, or of the repository."""
    ops: str
    """The canonical ops: name, arguments, what it computes."""
    request: str = ""
    """What a reviewer asks for, in the reviewer's words; "": nothing, the file is wrong."""

    @property
    def about(self) -> str:
        """The task in a line."""
        return f"{'change' if self.request else 'repair'} {self.block}: {self.problem}"


class Call(StrictModel):
    """A recorded call of a module: the shapes and dtypes of what it was given and gave."""

    arguments: dict[str, str]
    result: str


class PortTask(Task):
    """A block that has no translation."""

    model: str
    block: str
    problem: str
    """What of it has no translation."""
    source: str
    calls: list[Call]
    """Its calls in a probe."""
    ops: str

    @property
    def about(self) -> str:
        """The task in a line."""
        return f"port {self.block}: {self.problem}"


class ChecklistItem(StrictModel):
    """An item of the contract."""

    id: str
    title: str


class ReviewTask(Task):
    """A model's name and two paths; what is checked is the same for all models."""

    model: str
    model_file: str
    test_file: str
    checklist: list[ChecklistItem]

    @property
    def about(self) -> str:
        """The task in a line."""
        return f"review {self.model_file} and {self.test_file}"


class RunTask(Task):
    """A run's texts, and what earlier ones taught."""

    model: str
    config: str
    """Path of the standalone config that it ran with."""
    world_size: int
    """GPUs that it ran on."""
    description: str
    """The state: "first try", "retry after ..."."""
    status: str
    pairs: list[tuple[str, str]]
    """Prompts and outputs, verbatim."""
    log: str
    """The end of the run's log."""
    learnt: list[str]

    @property
    def about(self) -> str:
        """The task in a line."""
        return f"judge the run: {self.description}"


@dataclass(frozen=True)
class Role:
    """What is the same for all tasks of a role."""

    name: RoleName
    answer: type[Answer]

    def brief(self, task: Task, refusals: Sequence[str], root: Path | None = None) -> str:
        """Return the prompt: the role's template with the task and why earlier answers were not
        taken.
        """
        return render(
            f"agents/{self.name}.md.j2",
            root,
            task=task,
            refusals=refusals,
            schema=schema_of(self.answer),
        )


PORTER = Role("porter", PortAnswer)
REPAIRER = Role("repairer", RepairAnswer)
REVIEWER = Role("reviewer", ReviewAnswer)
RUNNER = Role("runner", RunAnswer)

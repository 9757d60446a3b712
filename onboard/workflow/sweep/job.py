"""Onboards one target in this process, which may be killed at any time: each step is written down
as it happens.

A second process judges what the first one left.
"""

from __future__ import annotations

import json
import os
import resource
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onboard.config import Mode, StrictModel
from onboard.errors import OnboardError
from onboard.user_cache import FOLDER_VARIABLE
from onboard.workflow.files import write_atomically
from onboard.workflow.outcome import PhaseOutcome
from onboard.workflow.phase import RunContext, RunOptions
from onboard.workflow.phase_runner import PhaseRunner, load_phases, open_run
from onboard.workflow.phases import PHASES
from onboard.workflow.processes.programs import ForkServer
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.verdict import Verdict

EVENTS, LOG, VERDICT = "events.jsonl", "log.txt", "verdict.json"
CHECKPOINT, ROOT = "checkpoint", "root"
Emit = Callable[..., None]


class Job(StrictModel):
    """One target and how it is to be onboarded."""

    target: Target
    folder: Path
    """The target's own: checkpoint, root, events and log."""
    mode: Mode = "graph"
    until: str = PHASES[-1]
    """Of mode graph: the last phase of the workflow; other modes build the checkpoint's model and
    run it.
    """
    device: str = "cpu"
    seconds: float = 600.0
    gibibytes: float = 8.0
    world_size: int = 1
    """Ranks on which it is judged, and run in a mode without a model file."""

    @property
    def checkpoint(self) -> Path:
        """Where the target's checkpoint is saved."""
        return self.folder / CHECKPOINT / self.target.folder


def run_child(job: Job) -> None:
    """Onboard the job's target; returns only when there is no more to say."""
    confine(job)
    events = (job.folder / EVENTS).open("a", encoding="utf-8", buffering=1)
    # Closed: what it used counts as this process's
    with (
        closing(ForkServer()) as programs,
        events as file,
    ):

        def emit(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")

        if _make_checkpoint(job, emit):
            _onboard(job, programs, emit) if job.mode == "graph" else _run(job, emit)
        emit(end=True)


def run_judge(job: Job) -> None:
    """Judge what `run_child` left, and write the verdict down."""
    from onboard.workflow.sweep.judge import judge

    confine(job)
    verdict = judge(job.checkpoint, job.folder / ROOT, job.device, world_size=job.world_size)
    write_atomically(job.folder / VERDICT, verdict.model_dump_json(indent=2) + "\n")


def read_verdict(job: Job) -> Verdict | None:
    """Return what `run_judge` wrote down."""
    path = job.folder / VERDICT
    return Verdict.model_validate_json(path.read_text("utf-8")) if path.exists() else None


def confine(job: Job) -> None:
    """Keep this process, and what it starts, to the job's memory and folder: what a killed one
    leaves goes with it.
    """
    _limit_memory(job.gibibytes)
    os.environ["TMPDIR"] = str(job.folder)
    os.environ[FOLDER_VARIABLE] = str(job.folder / "cache")


def _limit_memory(gibibytes: float) -> None:
    """Bound this process's own data. The whole address space is no measure: accelerators reserve
    more than they use.
    """
    limit = int(gibibytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _make_checkpoint(job: Job, emit: Emit) -> bool:
    """Save the tiny checkpoint; return whether there is a model to go on with, unless it is known
    not to be causal.
    """
    from onboard.analysis.tiny.tiny_config import one_line
    from onboard.workflow.sweep.inputs.tiny_checkpoint import make_checkpoint

    emit(step=CHECKPOINT)
    try:
        made = make_checkpoint(job.target, job.checkpoint)
    except Exception as error:  # a model's own code may raise anything; the coverage tells it
        os.write(2, traceback.format_exc().encode())
        emit(error=str(error) if isinstance(error, OnboardError) else one_line(error))
        return False
    emit(checkpoint=asdict(made))
    return made.is_causal is not False


def _onboard(job: Job, programs: ForkServer, emit: Emit) -> None:
    """Run the workflow on the checkpoint, in a root of the target's own, as the command does."""

    options = RunOptions(device=job.device, offline=True)
    root = job.folder / ROOT
    _make_checkout(root)
    context = open_run(str(job.checkpoint), root, options)
    context.run_module = programs
    outcome = PhaseRunner(load_phases(), _Observer(emit)).run(context, until=job.until)
    emit(exit_code=outcome.exit_code)
    _describe(context, emit)


def _make_checkout(root: Path) -> None:
    """Make the root a git checkout of its own: the one around it, if any, gets no branches of tiny
    models.
    """
    try:
        import git
    except ImportError:  # GitPython raises it when there is no git executable
        root.mkdir()
    else:
        git.Repo.init(root).close()


def _describe(context: RunContext, emit: Emit) -> None:
    """Say what there is to say of the files that were left."""
    for path in (context.root / "models").glob("modeling_*.py"):
        emit(lines=len(path.read_text(encoding="utf-8").splitlines()))
    if (tests := context.artifact("tests.json")).exists():
        emit(tests=json.loads(tests.read_text(encoding="utf-8"))["tests"])
    if (review := context.artifact("review.json")).exists():
        emit(notes=json.loads(review.read_text(encoding="utf-8")).get("notes"))


def _run(job: Job, emit: Emit) -> None:
    """Run the checkpoint in a mode that needs no model file."""
    from onboard.workflow.sweep.modes import run_mode

    run_mode(job.checkpoint, job.mode, job.device, emit, job.world_size)


class _Observer:
    """Passes on what the engine says."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    def waiting(self) -> None:
        """Nobody else has this root."""

    def started(self, name: str) -> None:
        """Note where the process is."""
        self.emit(step=name)

    def doing(self, text: str) -> None:
        """Nobody looks on."""

    def finished(self, outcome: PhaseOutcome) -> None:
        """Note how a phase went."""
        error = outcome.exception
        if error is not None and not isinstance(error, OnboardError):
            os.write(2, "".join(traceback.format_exception(error)).encode())
        phase = {
            "name": outcome.name,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 2),
            "error": outcome.error,
            "proving": _comes_from(error, "onboard.verify.blocks"),
            "internal": error is not None and not isinstance(error, OnboardError),
        }
        self.emit(phase=phase)


def _comes_from(error: BaseException | None, module: str) -> bool:
    frames = traceback.walk_tb(error.__traceback__) if error is not None else ()
    return any(frame.f_globals.get("__name__") == module for frame, _ in frames)

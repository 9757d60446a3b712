"""The tests and the run of a commit, in a clean checkout of it: what is posted with each push."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from onboard.config import StrictModel
from onboard.errors import OnboardError
from onboard.workflow.files import FileWriter, write_atomically
from onboard.workflow.lock import STAGING, WORK
from onboard.workflow.phase import RunContext
from onboard.workflow.phases import run as run_phase
from onboard.workflow.phases import test as test_phase
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.processes.programs import NOTHING, in_new_interpreter
from onboard.workflow.worklog import Worklog

PROOFS = "pushed"
"""Folder of the proofs in a model's work folder, a file a commit."""


class CommitLog(StrictModel):
    """One program's run on a commit."""

    title: str
    passed: bool
    outcome: str
    """In a line."""
    log: str
    """All that was printed."""
    record: dict[str, Any]
    """What the phase leaves of it: tests.json or run.json, made with that commit."""


class CommitProof(StrictModel):
    """What the tests and the run say of a commit."""

    commit: str
    tests: CommitLog
    run: CommitLog

    @property
    def passed(self) -> bool:
        """Whether both passed."""
        return self.tests.passed and self.run.passed

    @property
    def summary(self) -> str:
        """In a line."""
        both = (self.tests, self.run)
        return "; ".join(f"{each.title.lower()}: {each.outcome}" for each in both)

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """The records by the names of their artifacts."""
        return {"tests": self.tests.record, "run": self.run.record}

    @property
    def digest(self) -> str:
        """Tells proofs of one commit apart."""
        return sha256(self.model_dump_json().encode()).hexdigest()[:8]


def kept_proof(work_dir: Path, commit: str) -> CommitProof | None:
    """Return the proof of a commit that was made before, if there is one."""
    path = work_dir / PROOFS / f"{commit}.json"
    try:
        return CommitProof.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def keep_proof(work_dir: Path, proof: CommitProof) -> None:
    """Keep a proof: what is posted after a kill is what would have been."""
    write_atomically(work_dir / PROOFS / f"{proof.commit}.json", proof.model_dump_json(indent=1))


def proof_at(context: RunContext, root: Path, commit: str) -> CommitProof:
    """Test and run a model as a commit has it.

    Args:
        context: the model's run.
        root: the root in a checkout of that commit.
        commit: its name.
    """
    there = _context_at(context, root)
    return CommitProof(commit=commit, tests=_tests(there), run=_run(there))


def _tests(there: RunContext) -> CommitLog:
    path = test_phase.test_path(there)
    model = test_phase.model_path(there).as_posix()
    files = there.digest_of(model, path.as_posix())
    record: dict[str, Any] = {
        "command": f"python -m pytest -v {path}",
        "tests": [],
        "files": files,
        "model_file": {"path": model, "sha256": files[model]},
    }
    try:
        record |= test_phase.run_written(there, path)
        problem = test_phase.first_failed(record)
    except OnboardError as error:
        problem = error.message
        record["output"] = f"{error}\n"
    there.write_json("tests.json", record)  # the run looks whether its model file has passed
    outcome = problem or test_phase.summary(record["tests"])
    return CommitLog(
        title="Unit tests",
        passed=not problem,
        outcome=outcome,
        log=record["output"],
        record=record,
    )


def _run(there: RunContext) -> CommitLog:
    error = outcome = ""
    try:
        outcome = run_phase.Run().carry_out(there).summary
    except OnboardError as raised:
        error = raised.message
    record: dict[str, Any] = {"command": run_phase.agent_command(there), "runs": {}}
    if there.artifact(run_phase.ARTIFACT).exists():
        record = there.read_json(run_phase.ARTIFACT)
    return CommitLog(
        title="End-to-end run",
        passed=not error,
        outcome=error or outcome,
        log=_log_of(there, error),
        record=record,
    )


def _log_of(there: RunContext, error: str) -> str:
    logs = sorted(there.work_dir.glob("*.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1].read_text(encoding="utf-8", errors="replace") if logs else f"{error}\n"


def _context_at(context: RunContext, root: Path) -> RunContext:
    """Return the model's context under another root, which gets what is no part of a commit: the
    spec, the names, the code that the model brings.
    """
    work_dir = root / WORK / context.work_dir.name
    work_dir.mkdir(parents=True, exist_ok=True)
    for name in ("spec.yaml", REGISTRATION):
        shutil.copyfile(context.artifact(name), work_dir / name)
    if (code := context.artifact(test_phase.CODE)).is_dir():
        shutil.copytree(code, work_dir / test_phase.CODE, dirs_exist_ok=True)
    return replace(
        context,
        root=root,
        work_dir=work_dir,
        files=FileWriter(staging=work_dir / STAGING, root=root),
        worklog=Worklog(None),
        run_module=_InFolder(root),
    )


@dataclass(frozen=True)
class _InFolder:
    """Starts programs in a checkout, with the package that it has, where it has one."""

    root: Path

    def __call__(
        self,
        words: Sequence[str],
        output: IO[Any],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] = NOTHING,
    ) -> int:
        if (self.root / "onboard" / "__init__.py").is_file():
            paths = filter(None, (str(self.root), os.environ.get("PYTHONPATH")))
            environment = {**environment, "PYTHONPATH": os.pathsep.join(paths)}
        return in_new_interpreter(
            words, output, folder=folder or self.root, environment=environment
        )

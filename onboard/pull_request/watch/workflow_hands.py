"""A watcher's hands: the evidence of a model's run, its repairer, its phases and its branch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from onboard.agents.patch import diff_of
from onboard.agents.role_runs import load_runs
from onboard.errors import OnboardError, UsageError
from onboard.pull_request.cycle import PullRequestWork
from onboard.pull_request.forge.github_api import Pull
from onboard.pull_request.forge.patience import LaterError
from onboard.pull_request.forge.remarks import Said
from onboard.pull_request.pull_journal import Change, PullJournal
from onboard.pull_request.pushed_proof import CommitProof
from onboard.pull_request.readiness import require_clean
from onboard.pull_request.watch import evidence_answers
from onboard.pull_request.watch.speech import suggestion_of
from onboard.workflow import team
from onboard.workflow.phase import RunContext
from onboard.workflow.phase_runner import Observer, PhaseRunner, load_phases
from onboard.workflow.phases import test as test_phase
from onboard.workflow.phases.pull_request import commit_branch


@dataclass
class WorkflowHands:
    """Does what is asked of a pull request with what onboarding has."""

    work: PullRequestWork
    observer: Observer

    @property
    def context(self) -> RunContext:
        """The model's run."""
        return self.work.context

    def answer(self, said: Said) -> str:
        """Answer from the evidence."""
        return evidence_answers.answer(self.context, said)

    def propose(self, said: Said) -> Change:
        """Take a suggestion as it is, or ask the repairer; either has to pass proof and tests."""
        self._require_ready()
        path = test_phase.model_path(self.context)
        if said.place == "inline" and not _is_about(said, path.as_posix()):
            raise OnboardError(f"{said.path} is not for an agent to change, only {path}")
        old = self.context.files.read(self.context.root / path)
        tests = self.context.files.read(self.context.root / test_phase.test_path(self.context))
        check = partial(test_phase.problem_of, self.context, tests=tests)
        suggestion = suggestion_of(said.body)
        if suggestion is not None and said.place == "inline":
            return self._suggested(said, old, suggestion, check)
        return self._repaired(said, old, check)

    def commit(self, change: Change) -> None:
        """Write the change like a user's edit: the phases prove, test, review and run the model with
        it, and commit it.
        """
        self._require_unedited(change)
        files = self.context.files
        old = {path: files.read(self.context.root / path) for path in change.files}
        self._write(change.files)
        outcome = PhaseRunner(load_phases(), self.observer).run(self.context)
        error = outcome.exception
        if isinstance(error, OnboardError):
            self._write(old)
            raise error
        if error is not None:
            raise error
        # The phase may have been skipped after a kill
        commit_branch(self.context, self.work.branch.checkout)

    def push(self, pull: Pull, journal: PullJournal, change: str) -> CommitProof:
        """Rebase, push, prove and post."""
        return self.work.pushed(pull, journal, change)

    def _suggested(self, said: Said, old: str, lines: str, check: team.Check) -> Change:
        path = test_phase.model_path(self.context).as_posix()
        there = old.splitlines()[said.line - 1 :][:1] if said.line else []
        if not there or said.quoted not in (None, *there):
            raise OnboardError("the lines that it is about are not there any more")
        new = with_lines(old, said.first_line, said.line, lines)
        if new == old:
            raise OnboardError("the suggestion changes nothing")
        verdict = team.judged(self.context, new, check)
        if not verdict.passed:
            raise OnboardError(f"the tests fail with it: {verdict.said}")
        return self._change({path: old}, {path: new}, verdict.said)

    def _repaired(self, said: Said, old: str, check: team.Check) -> Change:
        path, spec = test_phase.model_path(self.context).as_posix(), self._spec_path
        old_spec = self.context.files.read(self.context.root / spec)
        block = evidence_answers.class_at(old, said.line) if said.line else ""
        request = team.Request(said.body, path if said.line else "", said.line, block)
        try:
            new = team.requested(self.context, old, request, more=check)
            new_spec = self.context.files.read(self.context.root / spec)
        finally:  # it is written when the change is
            self.context.files.write(self.context.root / spec, old_spec)
        if new is None:
            raise OnboardError("nobody plays the repairer here")
        after = next(
            (run.after for run in load_runs(self.context.work_dir)[::-1] if run.role == "repairer"),
            "",
        )
        return self._change({path: old, spec: old_spec}, {path: new, spec: new_spec}, after)

    def _change(self, old: dict[str, str], new: dict[str, str], after: str) -> Change:
        changed = {path: text for path, text in new.items() if text != old[path]}
        path = test_phase.model_path(self.context).as_posix()
        before = team.judged(self.context, old[path], lambda _: "").said
        return Change(
            diff=diff_of(old, changed),
            files=changed,
            replaces={path: _digest(old[path]) for path in changed},
            before=before,
            after=after,
        )

    @property
    def _spec_path(self) -> str:
        return self.context.relative(self.context.artifact(team.SPEC))

    def _write(self, files: dict[str, str]) -> None:
        for path, text in files.items():
            self.context.files.write(self.context.root / path, text)

    def _require_ready(self) -> None:
        """Raise `LaterError` while the user is at work on the files, or has the branch checked out."""
        branch = self.work.branch
        if branch.head in branch.checkout.checked_out():
            hint = "Switch to another branch; a change is committed there"
            raise LaterError(f"the branch {branch.head} is checked out", hint=hint)
        try:
            require_clean(self.context, branch)
        except UsageError as error:
            raise LaterError(error.message, hint=error.hint) from None

    def _require_unedited(self, change: Change) -> None:
        """Raise `OnboardError` where a file is neither as it was when the change was made nor as the
        change has it.
        """
        for path, text in change.files.items():
            found = self.context.files.digest(self.context.root / path)
            if found not in (change.replaces[path], _digest(text)):
                raise OnboardError(f"{path} was changed by hand since")


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _is_about(said: Said, path: str) -> bool:
    """Whether a comment on lines is on a file, whose repository may have the root deeper."""
    return f"/{said.path}".endswith(f"/{path}")


def with_lines(text: str, first: int, last: int, lines: str) -> str:
    """Return a text with the lines `first` to `last` (from 1) replaced."""
    old = text.splitlines(keepends=True)
    if not 1 <= first <= last <= len(old):
        raise OnboardError(f"the file has no lines {first} to {last}")
    new = lines if not lines or lines.endswith("\n") else f"{lines}\n"
    return "".join([*old[: first - 1], new, *old[last:]])

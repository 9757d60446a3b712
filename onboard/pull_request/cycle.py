"""Opening a model's pull request, and each update: rebased, pushed, and proven on the pushed commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from filelock import FileLock, Timeout

from onboard.errors import OnboardError, UsageError
from onboard.pull_request.forge.github_api import Forge, Pull
from onboard.pull_request.forge.posts import MOST, Post, log_posts, marked
from onboard.pull_request.pull_journal import PullJournal, now
from onboard.pull_request.pushed_proof import CommitProof, keep_proof, kept_proof, proof_at
from onboard.pull_request.readiness import require_clean, require_commits, require_own_head
from onboard.pull_request.remote_branch import RemoteBranch
from onboard.render import inline
from onboard.workflow.phase import RunContext
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.reporting.pull_request_body import body, update_comment
from onboard.workflow.reporting.tested_commit import Pushed

_LOCK = "pull_request.lock"
_SHOWN = 5
"""Titles of commits that an update names."""
Tell = Callable[[str], None]
Prove = Callable[[str], CommitProof]
"""A commit -> what its tests and its run say."""


def _to_nobody(_: str) -> None:
    """Nobody watches."""


@dataclass
class PullRequestWork:
    """A model's pull request: its files here, its branch, and its conversation on GitHub."""

    context: RunContext
    branch: RemoteBranch
    forge: Forge
    tell: Tell = _to_nobody
    prove: Prove = field(init=False)

    def __post_init__(self) -> None:
        self.prove = self._prove

    @property
    def label(self) -> str:
        """The head as GitHub names it."""
        return f"{self.branch.origin.owner}:{self.branch.head}"

    def open(self, *, draft: bool = False) -> PullJournal:
        """Open the pull request.

        Raises:
            UsageError: the branch is missing, not the model's own or not all that is in the tree.
            OnboardError: there is one, the commit's tests fail, or git or GitHub refuses.
        """
        with self.acting():
            self.branch.tip  # noqa: B018 (that there is one)
            require_own_head(self.forge, self.branch)
            self._require_first()
            require_clean(self.context, self.branch)
            commit = self.branch.rebase()
            require_commits(self.branch)
            proof = self.prove(commit)
            if not proof.passed:
                raise OnboardError(
                    f"nothing was opened: on {commit[:12]}, {proof.summary}", hint="Mend it first"
                )
            self.branch.push(self._pushed())
            first, *rest = self._body(proof)
            pull = self._created(first, draft)
            journal = self._noted(pull, commit)
            pull.put([*rest, *_log_of_run(proof)])
            self._log(f"opened {pull.url}", proof)
            return journal

    def update(self, *, again: bool = False) -> tuple[PullJournal, CommitProof]:
        """Rebase and push the branch, and post the logs of the tests and the run of what was pushed.

        Args:
            again: also where they are there.

        Raises:
            UsageError: nothing is open, or the tree has what the branch has not.
            OnboardError: git or GitHub refuses.
        """
        with self.acting():
            pull, journal = self.current()
            if pull.ended:
                raise UsageError(f"{pull.url} is {pull.ended}", hint="There is nothing to update")
            require_clean(self.context, self.branch)
            proof = self.pushed(pull, journal, again=again)
            for item in journal.handled.values():  # an update by hand is the user's answer
                item.waits_for = ""
            journal.save(self.context.work_dir)
            return journal, proof

    def pushed(
        self, pull: Pull, journal: PullJournal, change: str = "", *, again: bool = False
    ) -> CommitProof:
        """Rebase, push, prove and post; the lock is held.

        Args:
            pull: the pull request.
            journal: what is known of it.
            change: what is new, in words; "": what an update is.
            again: prove it, and post that, also where it was.
        """
        self.branch.rebase()
        self._note_push(journal, self.branch.push(frozenset(journal.pushed)))
        commit = journal.pushed[-1]
        proof = self._prove_anew(commit) if again else self.prove(commit)
        if commit == journal.pushed[0] and not again:
            self._post_opened(pull, proof)
            return proof
        change = change or self._what_is_there()
        pushed = Pushed(commit, self._target)
        parts = update_comment(self.context, pushed, change, records=proof.records, most=MOST)
        pull.put(marked(parts, f"update {commit[:12]}.{proof.digest}"))
        pull.put(_log_of_run(proof))
        self._log(f"pushed {commit}", proof)
        return proof

    def _what_is_there(self) -> str:
        subjects = self.branch.subjects()
        more = f" and {len(subjects) - _SHOWN} more" if len(subjects) > _SHOWN else ""
        return f"On top of {self.branch.target}: {'; '.join(subjects[:_SHOWN])}{more}."

    def current(self) -> tuple[Pull, PullJournal]:
        """Return the pull request and its journal, which is begun anew where it was lost.

        Raises:
            UsageError: there is none.
        """
        journal = PullJournal.load(self.context.work_dir)
        if journal is not None and journal.repository == self.forge.name:
            return self.forge.pull(journal.number), journal
        pull = self.forge.open_pull(self.label)
        if pull is None:
            raise UsageError(
                f"no pull request of {self.branch.head} is open on {self.forge.name}",
                hint=f"Open one with onboard pr open {self.context.model}",
            )
        return pull, self._noted(pull, pull.head_commit)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Hold the lock under which something is pushed or posted; others wait."""
        path = self.context.work_dir / _LOCK
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self.tell("waits for another command that works on this pull request")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _require_first(self) -> None:
        if (known := self.forge.open_pull(self.label)) is not None:
            raise OnboardError(
                f"{self.branch.head} has a pull request already: {known.url}",
                hint=f"onboard pr update {self.context.model} brings it up to date",
            )

    def _created(self, first: Post, draft: bool) -> Pull:
        name = " ".join(self.context.read_json(REGISTRATION)["name"].split())
        title, text = f"Onboard {name}"[:250], self.forge.access.hidden(first.body)
        return self.forge.create(self.label, self.branch.target, title, text, draft=draft)

    def _body(self, proof: CommitProof) -> list[Post]:
        """Return the generated text: the pull request's own, and comments for what that has no room
        for.
        """
        pushed = Pushed(proof.commit, self._target)
        parts = body(self.context, pushed, records=proof.records, most=MOST)
        return marked(parts, f"body {proof.commit[:12]}.{proof.digest}")

    @property
    def _target(self) -> str:
        """The target as the checkout knows it."""
        return f"{self.branch.upstream.remote}/{self.branch.target}"

    def _post_opened(self, pull: Pull, proof: CommitProof) -> None:
        """Post what an opening that was killed left out."""
        first, *rest = self._body(proof)
        if pull.first_mark == first.mark:
            pull.put(rest)
        pull.put(_log_of_run(proof))

    def _noted(self, pull: Pull, commit: str) -> PullJournal:
        journal = PullJournal(
            repository=self.forge.name,
            number=pull.number,
            url=pull.url,
            head=self.branch.head,
            remote=self.branch.origin.remote,
            upstream=self.branch.upstream.remote,
            target=self.branch.target,
            opened=now(),
            pushed=[commit],
            last_activity=now(),
        )
        journal.save(self.context.work_dir)
        return journal

    def _note_push(self, journal: PullJournal, commit: str) -> None:
        if journal.pushed[-1:] != [commit]:
            journal.pushed.append(commit)
            journal.last_activity = now()
            journal.save(self.context.work_dir)

    def _pushed(self) -> frozenset[str]:
        journal = PullJournal.load(self.context.work_dir)
        return frozenset(journal.pushed if journal is not None else ())

    def _log(self, what: str, proof: CommitProof) -> None:
        key = f"{what} {proof.digest}"
        self.context.worklog.append(f"pull request: {what}", proof.summary, key=key)

    def _prove(self, commit: str) -> CommitProof:
        kept = kept_proof(self.context.work_dir, commit)
        return kept if kept is not None else self._prove_anew(commit)

    def _prove_anew(self, commit: str) -> CommitProof:
        self.tell(f"tests and runs {commit[:12]} in a clean checkout")
        with self.branch.apart(commit) as folder:
            proof = proof_at(self.context, self.branch.root_in(folder), commit)
        keep_proof(self.context.work_dir, proof)
        return proof


def _log_of_run(proof: CommitProof) -> list[Post]:
    """Return the run's whole log; the tests' is in the text of the opening or the update."""
    state = "passed" if proof.run.passed else "failed"
    about = (
        f"End-to-end run on {proof.commit}: {state}, {inline(proof.run.outcome)}. The whole log:"
    )
    mark = f"log {proof.commit[:12]}.{proof.digest}"
    return log_posts(f"Log of the run on {proof.commit[:12]}", about, proof.run.log, mark)

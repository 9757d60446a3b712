"""What a watcher has done for it: answers, changes and proofs."""

from __future__ import annotations

from typing import Protocol

from onboard.pull_request.forge.github_api import Pull
from onboard.pull_request.forge.remarks import Said
from onboard.pull_request.pull_journal import Change, PullJournal
from onboard.pull_request.pushed_proof import CommitProof


class Hands(Protocol):
    """Who does what is asked for."""

    def answer(self, said: Said) -> str:
        """Return the answer to a question from the evidence, as Markdown; "" where it has none."""

    def propose(self, said: Said) -> Change:
        """Return a change that does what was asked and has passed the tests; nothing is written.

        Raises:
            OnboardError: there is none.
        """

    def commit(self, change: Change) -> None:
        """Write a change, prove the model with it and commit it on the branch; once more is as once.

        Raises:
            OnboardError: it does not hold; all is as before.
        """

    def push(self, pull: Pull, journal: PullJournal, change: str) -> CommitProof:
        """Push the branch, and post what the tests and the run of the pushed commit say."""

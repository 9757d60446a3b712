"""Where the pull requests under a root stand, as their journals say: GitHub is not asked."""

from __future__ import annotations

from pathlib import Path

from onboard.config import StrictModel
from onboard.pull_request.pull_journal import JOURNAL, PullJournal
from onboard.pull_request.watch.watch_lock import Watcher, current_watcher
from onboard.workflow.lock import WORK

_LETTERS = 70


class Waiting(StrictModel):
    """Something that was said and is not done with."""

    who: str
    """Who is waited for: "you", or "us" for what is under way."""
    kind: str
    author: str
    about: str
    url: str
    outcome: str

    @property
    def line(self) -> str:
        """It in a line."""
        return f"{self.who}: {self.kind} of {self.author}: {self.about} {self.url}"


class Standing(StrictModel):
    """One pull request."""

    model: str
    """The name of the work folder."""
    url: str
    head: str
    target: str
    status: str
    """"open", or why it has ended."""
    commit: str
    last_activity: str
    handled: int
    waiting: list[Waiting]
    watcher: Watcher | None

    @property
    def lines(self) -> list[str]:
        """It in a line, and one for each thing that waits."""
        waiting = (f"  waits for {item.line}" for item in self.waiting)
        return [self._line, *waiting]

    @property
    def _line(self) -> str:
        watched = f", watched by process {self.watcher.pid}" if self.watcher else ""
        return (
            f"{self.model}: {self.url} ({self.head} into {self.target}) {self.status}, "
            f"at {self.commit[:12]}, last activity {self.last_activity}{watched}"
        )


def standings(root: Path, folder: str = "") -> list[Standing]:
    """Return the pull requests under a root.

    Args:
        root: the root.
        folder: the name of a model's work folder; "": all.

    Raises:
        OnboardError: a journal is not of this version.
    """
    found = sorted((root / WORK).glob(f"{folder or '*'}/{JOURNAL}"))
    return [_standing(path.parent) for path in found]


def _standing(work_dir: Path) -> Standing:
    journal = PullJournal.load(work_dir)
    assert journal is not None
    waiting = [
        Waiting(
            who=item.waits_for or "us",
            kind=item.kind,
            author=item.author,
            about=item.about[:_LETTERS],
            url=item.url,
            outcome=item.outcome,
        )
        for item in journal.waiting()
    ]
    return Standing(
        model=work_dir.name,
        url=journal.url,
        head=journal.head,
        target=journal.target,
        status=journal.ended or "open",
        commit=journal.pushed[-1] if journal.pushed else "",
        last_activity=journal.last_activity,
        handled=sum(item.status == "done" for item in journal.handled.values()),
        waiting=waiting,
        watcher=current_watcher(work_dir),
    )

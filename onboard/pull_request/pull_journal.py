"""What is known of a model's pull request: `pull_request.json` in its work folder.

What somebody said is noted before it is acted on, and when it was answered. What was begun and not
done is taken up again by the next run, which looks for its mark on GitHub before it posts; so a
journal that was lost costs time and no second answer.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from onboard.config import StrictModel
from onboard.errors import OnboardError
from onboard.workflow.files import write_atomically

JOURNAL = "pull_request.json"
Kind = Literal["question", "change request", "approval", "end", "noise", "untrusted"]


class Change(StrictModel):
    """A change that was asked for, and has passed the tests."""

    diff: str
    files: dict[str, str]
    """Path under the root -> text."""
    replaces: dict[str, str]
    """Path -> sha256 of what is there before."""
    before: str
    after: str
    """What the tests said of each."""


class Handled(StrictModel):
    """What became of one thing that was said."""

    kind: Kind
    author: str
    about: str
    """Its first words."""
    url: str = ""
    status: Literal["begun", "done"] = "begun"
    outcome: str = ""
    waits_for: Literal["", "you"] = ""
    change: Change | None = None
    """What is to be committed for it; kept, so that a run that goes on proposes nothing new."""


class PullJournal(StrictModel):
    """A pull request, and what was done for it."""

    repository: str
    number: int
    url: str
    head: str
    target: str
    remote: str
    upstream: str
    """The git remotes that the branch is pushed to, and that has the target."""
    opened: str
    pushed: list[str] = Field(default_factory=list)
    """Commits that the branch had on the remote, the latest one last."""
    handled: dict[str, Handled] = Field(default_factory=dict)
    last_activity: str = ""
    """When something was last said by anybody else, or the branch was pushed; UTC."""
    ended: str = ""
    """Why nothing more is done: "approved by LOGIN", "merged", "closed", "LOGIN says so"."""

    @classmethod
    def load(cls, work_dir: Path) -> PullJournal | None:
        """Return a model's journal; None where there is none.

        Raises:
            OnboardError: it is not of this version.
        """
        path = work_dir / JOURNAL
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValidationError, ValueError, OSError) as error:
            raise OnboardError(
                f"{path} is not a journal of this version",
                hint="Remove it; what was answered is found on GitHub",
            ) from error

    def save(self, work_dir: Path) -> None:
        """Write it, whole or not at all."""
        text = self.model_dump_json(indent=2) + "\n"
        write_atomically(work_dir / JOURNAL, text)

    def waiting(self) -> list[Handled]:
        """Return what waits for the user, or is under way; nothing does at the end."""
        items = () if self.ended else self.handled.values()
        return [item for item in items if item.waits_for or item.status == "begun"]


def now() -> str:
    """Return the time, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")

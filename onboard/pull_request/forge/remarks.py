"""What people say on a pull request: its comments, the comments on lines, and reviews, all of one
shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Place = Literal["comment", "inline", "review"]
TRUSTED = ("OWNER", "MEMBER", "COLLABORATOR")
"""What GitHub calls people whom the repository's owner has let in."""


@dataclass(frozen=True)
class Said:
    """One thing that somebody said."""

    place: Place
    id: int
    author: str
    association: str
    """GitHub's word for what the author is to the repository."""
    is_bot: bool
    body: str
    at: datetime
    url: str = ""
    verdict: str = ""
    """Of a review: APPROVED, CHANGES_REQUESTED, COMMENTED, DISMISSED or PENDING."""
    commit: str = ""
    """Of a review: what was reviewed."""
    path: str = ""
    first_line: int = 0
    line: int = 0
    """Of a comment on lines: the last one in the new file; 0: it is no longer there."""
    quoted: str | None = None
    """Of a comment on lines: the last of them, as it was when that was written."""
    thread: int = 0
    """Of a comment on lines: the one that began their thread."""

    @property
    def key(self) -> str:
        """Its name in the journal and in marks."""
        return f"{self.place}-{self.id}"


def may_ask(said: Said, trusted: frozenset[str]) -> bool:
    """Whether its author can ask for anything: GitHub says so, or the user, by login (lower case)."""
    if said.author.lower() in trusted:
        return True
    return said.association in TRUSTED and not said.is_bot

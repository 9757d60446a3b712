"""What an agent has before it, in memory, and what it has said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from onboard.agents.refused import Usage

Event = Callable[[str, Mapping[str, Any]], None]
"""Hears what happens, by kind and with its data: the transcript."""


@dataclass(frozen=True)
class Verdict:
    """What the tests say of files."""

    passed: bool
    said: str
    """The largest error, or what is wrong."""


@dataclass(frozen=True)
class Workspace:
    """Copies of files; nothing that is done with them reaches the ones on the disk."""

    files: dict[str, str]
    """Relative path -> text."""
    editable: frozenset[str] = frozenset()
    """Which of them may be changed."""
    judge: Callable[[Mapping[str, str]], Verdict] | None = None
    """Tests files with these changes; None: there is nothing to test."""


@dataclass(frozen=True)
class Reply:
    """What came back of one attempt."""

    text: str
    """What was said last."""
    files: dict[str, str] = field(default_factory=dict)
    """What is other than it was given, by path."""
    usage: Usage = field(default_factory=Usage)


class BackEnd(Protocol):
    """Who plays a role."""

    def ask(self, prompt: str, workspace: Workspace, event: Event) -> Reply:
        """Return the reply to a prompt.

        Raises:
            RefusedError: there is none within the limits.
        """

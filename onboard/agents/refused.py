"""What an agent is told when its answer is not taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Usage:
    """What answers have taken."""

    tokens: int = 0
    cost: float = 0.0
    """US dollars."""
    estimated: bool = False
    """The back end does not say; four bytes are taken for a token."""

    def add(self, other: Usage) -> None:
        """Count another's, too."""
        self.tokens += other.tokens
        self.cost += other.cost
        self.estimated = self.estimated or other.estimated


class RefusedError(Exception):
    """An answer that is not taken; the message says why, to the agent and to the user."""

    def __init__(self, reason: str, usage: Usage | None = None) -> None:
        super().__init__(reason)
        self.usage = usage if usage is not None else Usage()
        """What it has taken all the same."""

"""Who drafts: proposes tokens that may come next. What is proposed never changes what is generated,
only how many steps it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from onboard.runtime.scheduling.request import Request


class Drafter(Protocol):
    """Proposes tokens for running requests."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return tokens that may follow those of each request; an empty list where it has no
        idea.
        """

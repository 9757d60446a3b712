"""Drafts from the text itself: what followed its last tokens when they occurred before.

Yang et al. 2023, "Inference with Reference" (arXiv:2304.04487); Saxena 2023, "Prompt Lookup
Decoding". It costs no model, and helps where texts repeat themselves: code, quotations, corrections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from onboard.runtime.scheduling.request import Request

LONGEST, SHORTEST = 4, 2
"""Numbers of last tokens that are looked up; the longest that occurred before counts."""


@dataclass
class _Index:
    """Where the runs of tokens of one request end, the latest of each."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    known: int = 0
    """Leading tokens whose runs are in `ends`."""

    def add(self, tokens: Sequence[int]) -> None:
        """Add the runs that end before the last token: what follows those is known."""
        for end in range(self.known + 1, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(tokens[end - length : end])] = end
        self.known = max(len(tokens) - 1, self.known)

    def following(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed the last ones before."""
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            end = self.ends.get(tuple(tokens[-length:]))
            if end is not None:
                return _repeated(tokens, end, most)
        return []


def _repeated(tokens: Sequence[int], start: int, most: int) -> list[int]:
    """Return `most` tokens from `start` on; at the end of the text it begins again at `start`, so
    that a short period goes on.
    """
    period = len(tokens) - start
    return [tokens[start + index % period] for index in range(most)]


class NgramDrafter:
    """Looks the last tokens of each request up in its own text."""

    def __init__(self, num_tokens: int) -> None:
        self._most = num_tokens
        self._indexes: WeakKeyDictionary[Request, _Index] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return what followed each request's last tokens before, [] if they are new."""
        return [self._of(request) for request in requests]

    def _of(self, request: Request) -> list[int]:
        index = self._indexes.setdefault(request, _Index())
        index.add(request.tokens)
        return index.following(request.tokens, self._most)

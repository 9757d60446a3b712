"""The rows of logits of a step with drafts, and what follows from the tokens chosen from them.

A draft is right if it is the token that is chosen at its place. Choices have random numbers of their
own, by request and place (`ops/sampling/sampling.py`): so the tokens are those that would have been
chosen one a step, also of sampled outputs. That is the acceptance rule of Leviathan et al. 2023
(arXiv:2211.17192) for drafts that are certain, without its second draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onboard.cache.step_buffer import IntArray
from onboard.runtime.scheduling.request import Request, Step


@dataclass(frozen=True)
class DraftedRows:
    """Of a step that is about to be launched: a row of logits for each sequence's last token, and
    one for each draft.
    """

    places: IntArray
    """[rows] index of each row's token in the row of tokens."""
    first: IntArray
    """[sequences] the first row of each."""
    drafts: Sequence[tuple[int, ...]]
    """Of each sequence."""
    adjusted: Sequence[tuple[int, Request]]
    """(row, sequence) where logits are changed before a token is chosen; such have no drafts."""

    def accepted(self, step: Step, tokens: Sequence[int]) -> list[list[int]]:
        """Return the new tokens of each sequence: its drafts up to the first wrong one, and the
        token that was chosen after these; none for a prompt's chunk that is not the last.

        `tokens` [rows] were chosen from the rows.
        """
        new = []
        for chunk, first, drafts in zip(step.chunks, self.first.tolist(), self.drafts, strict=True):
            right = next(
                (at for at, draft in enumerate(drafts) if draft != tokens[first + at]), len(drafts)
            )
            new.append(list(tokens[first : first + right + 1]) if chunk.completes else [])
        return new


def drafted_rows(step: Step) -> DraftedRows:
    """Return the rows of a step, before it counts as launched."""
    drafts = [chunk.drafts for chunk in step.chunks]
    counts = np.array([1 + len(each) for each in drafts])
    first = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(counts)), counts)
    after = np.arange(counts.sum()) - np.repeat(first + counts, counts)  # 1 before the end: -1
    ends = np.cumsum([chunk.length for chunk in step.chunks])
    return DraftedRows(
        places=ends[owners] + after,
        first=first,
        drafts=drafts,
        adjusted=[(int(first[index]), request) for index, request in step.rows.adjusted],
    )

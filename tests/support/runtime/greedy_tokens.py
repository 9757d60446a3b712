"""Greedy tokens of a reference, and where another implementation may go on otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

TIE = 2e-5
"""Two float32 implementations differ by about 1e-6 in the tests' logits, whose spread is about 1."""


class GreedyTokens(list[int]):
    """A reference's greedy tokens.

    Other tokens are equal to them when they are the same up to the first tie: where two logits are
    closer than `TIE`, either token is right, and all behind it differ.
    """

    def __init__(self, tokens: Sequence[int], sure: int) -> None:
        super().__init__(tokens)
        self.sure = sure
        """How many tokens there are before the first tie."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return list(other[: self.sure]) == self[: self.sure]

    __hash__ = None  # type: ignore[assignment]


def greedy_tokens(
    logits: Callable[[list[int]], torch.Tensor], ids: list[int], count: int, tie: float = TIE
) -> GreedyTokens:
    """Return `count` greedy tokens behind `ids`; `logits` [tokens, vocabulary] are those of a text."""
    known, sure = list(ids), count
    for step in range(count):
        last = logits(known)[-1]
        best = last.topk(2).values
        if best[0] - best[1] < tie:
            sure = min(sure, step)
        known.append(int(last.argmax()))
    return GreedyTokens(known[len(ids) :], sure)

"""What is measured: how many sequences at a time, how long their prompts are, how many tokens each
goes on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A batch of prompts of equal length."""

    batch: int
    context: int
    """Tokens of each prompt."""
    output: int
    """Tokens to generate for each, at least 2: the first one ends the prefill, the others are
    decoded.
    """

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.context + self.output

    @property
    def mean_length(self) -> int:
        """Keys that a decode step reads of a sequence, on average."""
        return self.context + self.output // 2

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Return random prompts; the same ones for the same shape and seed."""
        draw = random.Random(f"{seed} {self.batch} {self.context}")
        return [
            [draw.randrange(vocabulary) for _ in range(self.context)] for _ in range(self.batch)
        ]


def grid(batches: list[int], contexts: list[int], output: int) -> list[Shape]:
    """Return every batch with every context, contexts outermost."""
    return [Shape(batch, context, output) for context in contexts for batch in batches]

"""The layout of one step's tokens: the sequences' tokens one behind the other, padding last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onboard.cache.step_buffer import IntArray, StepSizes, padded


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which token is where. The last `padding` sequences, of `padding_tokens` tokens in
    all, are padding, and are counted in all sizes here.
    """

    kv_lens: IntArray
    """[sequences] cached tokens after the step."""
    longest: int
    """Largest number of new tokens of one sequence."""
    padding: int
    padding_tokens: int
    sequence: IntArray
    """[tokens] index of each token's sequence."""
    positions: IntArray
    """[tokens] index of each token in its sequence."""
    ends: IntArray
    """[sequences] where each sequence's tokens end in the row of tokens."""


def laid_out(
    order: IntArray, starts: IntArray, lengths: IntArray | None, added: IntArray
) -> StepLayout:
    """Lay a step out.

    Args:
        order: 0, 1, 2 and so on, as many as the longest step has tokens, and one more.
        starts: [sequences] number of cached tokens.
        lengths: [sequences] number of new tokens; None: one each, as in `added`.
        added: [padding sequences] number of their tokens, which come first in their sequences.
    """
    starts = padded(starts, len(added), 0)
    count = len(starts)
    if lengths is None:  # decode: the fast path
        return StepLayout(
            starts + 1, 1, len(added), len(added), order[:count], starts, order[1 : count + 1]
        )
    lengths = np.concatenate([lengths, added])
    ends = np.cumsum(lengths)
    return StepLayout(
        kv_lens=starts + lengths,
        longest=int(lengths.max()),
        padding=len(added),
        padding_tokens=int(added.sum()),
        sequence=np.repeat(order[:count], lengths),
        positions=order[: ends[-1]] - np.repeat(ends - starts - lengths, lengths),
        ends=ends,
    )


def padding_to(size: StepSizes, lengths: IntArray) -> IntArray:
    """Return the lengths of the padding sequences that bring sequences of `lengths` to the size of a
    captured step: the first has all tokens that are missing, the others have none.
    """
    added = np.zeros(size.sequences - len(lengths), dtype=np.int64)
    added[0] = size.tokens - lengths.sum()
    return added


def single_tokens(
    starts: IntArray, lengths: IntArray | None, rope_length: int, sizes: Sequence[int]
) -> IntArray:
    """Return the lengths, all 1, of the padding sequences of a step that is not captured whole.

    One is for the rotary table, where no sequence reaches `rope_length`; with them the number of
    sequences is one of `sizes`, ascending, if one of these is large enough.
    """
    count = len(starts)
    longest = (starts + (1 if lengths is None else lengths)).max() if rope_length else 0
    least = count + bool(rope_length > longest)
    return np.ones(next((size for size in sizes if size >= least), least) - count, dtype=np.int64)

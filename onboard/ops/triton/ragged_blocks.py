# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Blocks of rows of sequences that have unlike numbers of new tokens, counted through.

A grid of as many blocks as the longest sequence has, for each sequence, is mostly programs that find
nothing to do where one prompt comes with many sequences that decode.
"""

from __future__ import annotations

import triton
import triton.language as tl


def most_blocks(tokens: int, sequences: int, rows: int, block: int) -> int:
    """Return how many blocks `block_of` counts: those of `tokens` tokens of `rows` rows each, and up
    to one more for each sequence.
    """
    return tokens * rows // block + sequences


@triton.jit
def block_of(
    number, cu_seqlens_ptr, sequences, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr = 128
):  # fmt: skip
    """Return the sequence that block `number` belongs to, and which of the sequence's blocks it is.

    Blocks of sequence s begin with number start(s) * ROWS // BLOCK_M + s, so that it has at least
    what its rows need, and at most one more, and WIDTH sequences are looked at in one step.
    """
    found = 0
    for first in range(0, sequences, WIDTH):
        s = first + tl.arange(0, WIDTH)
        begins = tl.load(cu_seqlens_ptr + s, mask=s < sequences, other=0) * ROWS // BLOCK_M + s
        found += tl.sum(((s < sequences) & (begins <= number)).to(tl.int32), 0)
    sequence = found - 1
    return sequence, number - (tl.load(cu_seqlens_ptr + sequence) * ROWS // BLOCK_M + sequence)

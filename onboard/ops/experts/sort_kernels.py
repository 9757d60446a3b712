# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels that sort the pairs of a token and a chosen expert by expert.

A counting sort (Knuth, The Art of Computer Programming, vol. 3, section 5.2) brings the pairs of
each expert together and cuts them into blocks of BLOCK_M rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.triton.overlap import wait_for_inputs


@triton.jit
def _load_ids(ids_ptr, pair, pairs, EXPERTS: tl.constexpr):
    """Return the experts of pairs; those that are not here, and what is no pair, have number
    EXPERTS.
    """
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)


@triton.jit
def _count(ids_ptr, start, stop, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
    """Return how many of the pairs start..stop each expert has."""
    column = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(start, stop, ROWS):
        expert = _load_ids(ids_ptr, first + tl.arange(0, ROWS), stop, EXPERTS)
        counts += tl.sum(
            ((expert[:, None] == column[None, :]) & (column < EXPERTS)[None, :]).to(tl.int32), 0
        )
    return counts


@triton.jit
def _write_blocks(
    blocks_ptr,
    totals,
    program,
    programs,
    blocks,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write this program's share of the table of blocks.

    A block is (expert, first place, end of its expert's places); one without rows has an end of 0.
    """
    column, ends = tl.arange(0, BLOCK_E), tl.cumsum(totals, 0)
    each = (totals + BLOCK_M - 1) // BLOCK_M
    last_blocks = tl.cumsum(each, 0)
    first_blocks = last_blocks - each
    for first in range(program * ROWS, blocks, programs * ROWS):
        block = first + tl.arange(0, ROWS)
        mine = (block[:, None] >= first_blocks[None, :]) & (block[:, None] < last_blocks[None, :])
        expert = tl.sum(tl.where(mine, column[None, :], 0), 1)
        end = tl.sum(tl.where(mine, ends[None, :], 0), 1)
        begin = (
            tl.sum(tl.where(mine, (ends - totals - first_blocks * BLOCK_M)[None, :], 0), 1)
            + block * BLOCK_M
        )
        tl.store(blocks_ptr + block * 3, expert, mask=block < blocks)
        tl.store(blocks_ptr + block * 3 + 1, begin, mask=block < blocks)
        tl.store(blocks_ptr + block * 3 + 2, end, mask=block < blocks)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def sort_kernel(
    order_ptr, blocks_ptr, ids_ptr, pairs, blocks,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    PLACED: tl.constexpr, COMPARED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sort few pairs at once: each of PLACED pairs looks at all others to find its place."""
    wait_for_inputs(OVERLAP)
    pair = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    expert = _load_ids(ids_ptr, pair, pairs, EXPERTS)
    place = tl.zeros([PLACED], tl.int32)
    for first in range(0, pairs, COMPARED):
        other = first + tl.arange(0, COMPARED)
        theirs = _load_ids(ids_ptr, other, pairs, EXPERTS)[None, :]
        earlier = (theirs == expert[:, None]) & (other[None, :] < pair[:, None])
        place += tl.sum(((theirs < expert[:, None]) | earlier).to(tl.int32), 1)
    tl.store(order_ptr + place, pair, mask=(pair < pairs) & (expert < EXPERTS))
    totals = _count(ids_ptr, 0, pairs, EXPERTS, BLOCK_E, ROWS)
    _write_blocks(
        blocks_ptr, totals, tl.program_id(0), tl.num_programs(0), blocks, BLOCK_E, ROWS, BLOCK_M
    )


@triton.jit(do_not_specialize=["pairs", "chunk"])
def count_kernel(
    counts_ptr,
    ids_ptr,
    pairs,
    chunk,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Count the pairs of each expert in one chunk."""
    start = tl.program_id(0) * chunk
    counts = _count(ids_ptr, start, tl.minimum(start + chunk, pairs), EXPERTS, BLOCK_E, ROWS)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["pairs", "chunk", "chunks", "blocks"])
def place_kernel(
    order_ptr, blocks_ptr, counts_ptr, starts_ptr, ids_ptr, pairs, chunk, chunks, blocks,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    MOST_CHUNKS: tl.constexpr, PLACED: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Place one chunk's pairs behind those of earlier chunks, and write a share of the table of
    blocks.
    """
    program, column, row = (
        tl.program_id(0),
        tl.arange(0, BLOCK_E),
        tl.arange(0, MOST_CHUNKS)[:, None],
    )
    counts = tl.load(counts_ptr + row * BLOCK_E + column[None, :], mask=row < chunks, other=0)
    totals = tl.sum(counts, 0)
    starts_ptr += program * BLOCK_E
    tl.store(
        starts_ptr + column,
        tl.cumsum(totals, 0) - totals + tl.sum(tl.where(row < program, counts, 0), 0),
    )
    tl.debug_barrier()  # all starts are written
    start = program * chunk
    stop = tl.minimum(start + chunk, pairs)
    for first in range(start, stop, PLACED):
        pair = first + tl.arange(0, PLACED)
        expert = _load_ids(ids_ptr, pair, stop, EXPERTS)
        place = tl.load(starts_ptr + expert, mask=expert < EXPERTS, other=0)
        for low in range(start, first + PLACED, COMPARED):
            other = low + tl.arange(0, COMPARED)
            theirs = _load_ids(ids_ptr, other, stop, EXPERTS)[None, :]
            place += tl.sum(
                ((theirs == expert[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32), 1
            )
        tl.store(order_ptr + place, pair, mask=expert < EXPERTS)
    _write_blocks(blocks_ptr, totals, program, chunks, blocks, BLOCK_E, ROWS, BLOCK_M)

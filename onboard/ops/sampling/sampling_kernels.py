# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels of the choice of tokens, as `onboard.ops.sampling.sampling.choose_tokens` defines it.

Each row says itself, in device memory, what is to be done with it, so that one captured kernel
serves all requests: `largest_kernel` is all that a greedy row needs. What a filter keeps are the
tokens down to one logit, and of those that have it exactly the first few: that logit is found bit
by bit, by counting (or weighing) the tokens above a bound.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def largest_kernel(
    largest_ptr, index_ptr, logits_ptr, stride, VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the largest logit of one part of a row and where it is first; a NaN counts as
    infinite.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < VOCABULARY, other=-INFINITY).to(
        tl.float32
    )
    x = tl.where(x == x, x, INFINITY)
    largest = tl.max(x, 0)
    tl.store(largest_ptr + row * CHUNKS + chunk, largest)
    tl.store(index_ptr + row * CHUNKS + chunk, tl.min(tl.where(x == largest, token, VOCABULARY), 0))


@triton.jit
def fill_kernel(out_ptr, ids_ptr, latest_ptr, count, BLOCK: tl.constexpr):
    """Copy token ids; a negative one is the slot, negated, whose latest token it stands for."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + i, mask=i < count, other=0)
    latest = tl.load(latest_ptr - ids, mask=ids < 0, other=0)
    tl.store(out_ptr + i, tl.where(ids < 0, latest, ids), mask=i < count)


@triton.jit
def _order(x, SHIFT: tl.constexpr):
    """Return integers that are in the order of the floats; SHIFT bits at the end, the same in all,
    are left out.
    """
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _load(
    logits_ptr,
    first,
    largest,
    heat,
    VOCABULARY: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return order and weight of BLOCK tokens from `first` on; behind the vocabulary the weight is
    0.
    """
    token = first + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + token, mask=token < VOCABULARY, other=-INFINITY).to(tl.float32)
    return _order(x, SHIFT), tl.exp((x - largest) / heat)


@triton.jit
def _above(
    bound, logits_ptr, largest, heat, min_p, VOCABULARY: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count the tokens above a bound, and weigh those that min-p keeps."""
    count, weight = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        order, each = _load(logits_ptr, first, largest, heat, VOCABULARY, SHIFT, BLOCK)
        count += tl.where(order > bound, 1, 0)
        weight += tl.where((order > bound) & (each >= min_p), each, 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _weight_of(order, largest, heat, SHIFT: tl.constexpr):
    """Return the weight of a logit from its place in the order."""
    bits = order << SHIFT
    bits = tl.where(order < 0, bits | ((1 << SHIFT) - 1), bits)
    x = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((x - largest) / heat)


@triton.jit
def _filter(
    logits_ptr, largest, heat, top_k, top_p, min_p, VOCABULARY: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return down to which logit tokens are kept, how many of those that have it, and the weight of
    all together.
    """
    lowest = -(1 << (31 - SHIFT))
    bound, ties = tl.zeros([], tl.int64) + lowest, 0
    total = tl.zeros([], tl.float32)
    if (top_k > 0) & (top_k < VOCABULARY):
        high = tl.zeros([], tl.int64) + (-lowest - 1)
        for _ in range(32 - SHIFT):  # the largest bound with at least top_k tokens at it or above
            middle = (bound + high + 1) >> 1
            count, above = _above(
                middle - 1, logits_ptr, largest, heat, min_p, VOCABULARY, SHIFT, BLOCK
            )
            bound, high = (
                tl.where(count >= top_k, middle, bound),
                tl.where(count >= top_k, high, middle - 1),
            )
        count, total = _above(bound, logits_ptr, largest, heat, min_p, VOCABULARY, SHIFT, BLOCK)
        ties = top_k - count
    else:
        count, total = _above(bound, logits_ptr, largest, heat, min_p, VOCABULARY, SHIFT, BLOCK)
    each = _weight_of(bound.to(tl.int32), largest, heat, SHIFT)
    each = tl.where((ties > 0) & (each >= min_p), each, 0.0)
    total += ties * each
    if top_p < 1.0:
        wanted, high = top_p * total, tl.zeros([], tl.int64) + (-lowest - 1)
        for _ in range(32 - SHIFT):  # the smallest bound above which there is too little
            middle = (bound + high) >> 1
            count, above = _above(
                middle, logits_ptr, largest, heat, min_p, VOCABULARY, SHIFT, BLOCK
            )
            ties = tl.where((above >= wanted) & (bound <= middle), VOCABULARY, ties)
            bound, high = (
                tl.where(above < wanted, bound, middle + 1),
                tl.where(above < wanted, middle, high),
            )
        beyond, above = _above(bound, logits_ptr, largest, heat, min_p, VOCABULARY, SHIFT, BLOCK)
        count, total = _above(bound - 1, logits_ptr, largest, heat, min_p, VOCABULARY, SHIFT, BLOCK)
        ties = tl.minimum(ties, count - beyond)
        each = _weight_of(bound.to(tl.int32), largest, heat, SHIFT)
        # Where there is none, it is not a number
        each = tl.where((ties > 0) & (each > 0), each, 1.0)
        enough = tl.maximum(tl.ceil((wanted - above) / each), 1.0)
        ties = tl.minimum(enough, ties.to(tl.float32)).to(tl.int32)
        total = above + ties * each
    return bound.to(tl.int32), ties, total


@triton.jit
def choose_kernel(
    tokens_ptr, largest_ptr, index_ptr, logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr,
    latest_ptr, landed_ptr, slots_ptr, lengths_ptr, stride,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, SHIFT: tl.constexpr,
    NOT_A_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row; keep it at the row's slot, for the next step and for the
    host.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    parts = tl.load(largest_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=-INFINITY)
    places = tl.load(index_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=VOCABULARY)
    largest = tl.max(parts, 0)
    token = tl.min(tl.where(parts == largest, places, VOCABULARY), 0)
    finite = (largest < INFINITY) & (largest > -INFINITY)
    heat = tl.load(temperature_ptr + row)
    if (heat > 0) & finite:
        logits_ptr += row * stride
        top_k, min_p = tl.load(top_k_ptr + row).to(tl.int32), tl.load(min_p_ptr + row)
        bound, ties, total = _filter(
            logits_ptr,
            largest,
            heat,
            top_k,
            tl.load(top_p_ptr + row),
            min_p,
            VOCABULARY,
            SHIFT,
            BLOCK,
        )
        target = (tl.load(uniform_ptr + row) * total).to(tl.float32)
        passed, met, found = tl.zeros([], tl.float32), 0, -1
        for first in range(0, VOCABULARY, BLOCK):
            order, each = _load(logits_ptr, first, largest, heat, VOCABULARY, SHIFT, BLOCK)
            tie = tl.where(order == bound, 1, 0)
            early = (tie > 0) & (met + tl.cumsum(tie, 0) <= ties)
            weight = tl.where(((order > bound) | early) & (each >= min_p), each, 0.0)
            reached = (passed + tl.cumsum(weight, 0) > target) & (weight > 0)
            place = first + tl.arange(0, BLOCK)
            here = tl.min(tl.where(reached, place, VOCABULARY), 0)
            last = tl.max(tl.where(weight > 0, place, -1), 0)
            missing = (found < 0) | (passed <= target)
            found = tl.where(
                missing & (here < VOCABULARY), here, tl.where(missing & (last >= 0), last, found)
            )
            # Once it is found, no later part may count.
            passed = tl.where(here < VOCABULARY, INFINITY, passed + tl.sum(weight, 0))
            met += tl.sum(tie, 0)
        token = tl.where(found >= 0, found, token)
    token = tl.where(finite, token, NOT_A_TOKEN)
    token = token.to(tl.int64)
    slot, length = tl.load(slots_ptr + row), tl.load(lengths_ptr + row)
    tl.store(tokens_ptr + row, token)
    tl.store(latest_ptr + slot, tl.maximum(token, 0))
    tl.store(landed_ptr + slot * 2 + length % 2, token)

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""The kernel of attention over a paged cache of latents.

With the weights of keys absorbed into the queries, all heads attend to one key a token, the latent
and a rotated part, and their values are the latents again (DeepSeek-V2, arXiv:2405.04434, section
2.1.2): a tile of the cache is read once and used twice. The rows are the pairs of a query and a
head; softmax and splits are those of `attention_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from onboard.ops.attention.attention_kernels import (
    LOG2E,
    _keys_per_split,
    _store_new_token,
    as_stored,
)
from onboard.ops.attention.rotation_kernels import load_turned
from onboard.ops.triton.ragged_blocks import block_of


@triton.jit
def load_rows(row_ptr, real, SIZE: tl.constexpr, BLOCK: tl.constexpr, DOT_TYPE: tl.constexpr):
    """Return the `SIZE` channels of each real row, as operands of a matrix product; those of the
    others are 0.
    """
    channel = tl.arange(0, BLOCK)
    inside = real[:, None] & (channel < SIZE)[None, :]
    return tl.load(row_ptr[:, None] + channel[None, :], mask=inside, other=0.0).to(DOT_TYPE)


@triton.jit
def store_new_latent(
    latent_ptr, key_ptr, slot, cache_ptr, k_scale, cos_ptr, sin_ptr, stride_page, stride_slot,
    HAS_SCALE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Store the latent and the key of a new token in its slot, with HAS_SCALE divided by it."""
    channel, turned = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    latent = tl.load(latent_ptr + channel, mask=channel < RANK)
    if TURNS:
        key = load_turned(key_ptr, turned, turned < ROPE, cos_ptr, sin_ptr, SIZE, STEP, TURNS)
    else:
        key = tl.load(key_ptr + turned, mask=turned < ROPE)
    if HAS_SCALE:
        latent, key = latent / k_scale, key / k_scale
    latent = as_stored(latent, cache_ptr.dtype.element_ty)
    key = as_stored(key, cache_ptr.dtype.element_ty)
    _store_new_token(cache_ptr, latent, slot, stride_page, stride_slot, channel, RANK, PAGE)
    _store_new_token(cache_ptr + RANK, key, slot, stride_page, stride_slot, turned, ROPE, PAGE)


@triton.jit
def _page_start(table_ptr, first, high, stride_page, PAGE: tl.constexpr):
    """Return where in the cache the page begins that holds the keys `first` of a sequence, those
    below `high`.
    """
    return tl.load(table_ptr + first // PAGE, mask=first < high, other=0).to(tl.int64) * stride_page


@triton.jit
def _key_places(
    table_ptr, tile, high, stride_page, stride_slot, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return where in the cache each key of a tile of a sequence begins, as far as they are below
    `high`.
    """
    i = tl.arange(0, BLOCK_N)
    # A few look-ups for all threads
    if PAGE % BLOCK_N == 0 or (BLOCK_N % PAGE == 0 and BLOCK_N <= 4 * PAGE):
        place = (
            _page_start(table_ptr, tile, high, stride_page, PAGE) + (tile % PAGE + i) * stride_slot
        )
        for part in tl.static_range(PAGE, BLOCK_N, PAGE):
            start = _page_start(table_ptr, tile + part, high, stride_page, PAGE)
            place = tl.where(i < part, place, start + (i - part) * stride_slot)
        return place
    else:
        n = tile + i
        return _page_start(table_ptr, n, high, stride_page, PAGE) + (n % PAGE) * stride_slot


@triton.jit
def _attend_latents(
    query, rotated, position, low, high, seen_by_all, scale, table_ptr, cache_ptr, stride_page, stride_slot,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
):  # fmt: skip
    """Return the peak and the sum of the weights of each row over the keys low..high, and its
    weighted sum of latents.

    Every row sees the first of them; all rows see those below `seen_by_all`.

    Three things are here for Triton's compiler, which would else choose a much slower order and
    layout. The sums start as constants: matrix products whose registers others write to, too, wait
    for one another. The outer `if` holds
    always: what is in it is done behind the loads of the next tile, which have that time to arrive.
    And the inner one parts the products, so that the scores of a tile are shared out among all
    warps, not computed twice.
    """
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    for tile in range(low, high, BLOCK_N):
        stored = tile + tl.arange(0, BLOCK_N) < high
        place = cache_ptr + _key_places(
            table_ptr, tile, high, stride_page, stride_slot, PAGE, BLOCK_N
        )
        latents = load_rows(place, stored, RANK, BLOCK_RANK, query.dtype)
        keys = load_rows(place + RANK, stored, ROPE, BLOCK_ROPE, query.dtype)
        scores = tl.dot(rotated, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(query, tl.trans(latents), scores, input_precision="ieee") * (scale * LOG2E)
        if tile < high:
            if tile + BLOCK_N > seen_by_all:
                n = tile + tl.arange(0, BLOCK_N)[None, :]
                scores = tl.where((n < high) & (n <= position[:, None]), scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
            decay = tl.exp2(peak - new_peak)
            total = total * decay + tl.sum(weights, 1)
            mixed = tl.dot(
                weights.to(query.dtype), latents, mixed * decay[:, None], input_precision="ieee"
            )
            peak = new_peak
    return peak, total, mixed


@triton.jit(do_not_specialize=["sequences"])
def mla_kernel(
    out_ptr, lse_ptr, query_ptr, rotated_ptr, latent_ptr, key_ptr, cu_seqlens_ptr, kv_lens_ptr, block_table_ptr,
    slot_ptr, cache_ptr, k_scale_ptr, cos_ptr, sin_ptr, scale, sequences, cos_stride, sin_stride,
    query_stride_token, query_stride_head, rotated_stride_token, rotated_stride_head, latent_stride, key_stride,
    table_stride, stride_page, stride_slot,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, WRITE: tl.constexpr, HAS_SCALE: tl.constexpr, DOT_TYPE: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    SIZE: tl.constexpr = 0, STEP: tl.constexpr = 1, TURNS: tl.constexpr = 0,
):  # fmt: skip
    """Attend BLOCK_M rows of one sequence over one share of its keys; programs of the same share
    are neighbours.

    With WRITE each sequence has one new token: the programs whose share holds it all store it, so
    that none waits for another. SPLIT as in `attention_kernel`: out is [tokens, heads, splits,
    rank] float32. With EARLY the kernel after it may be started now, and waits for this one. With
    HAS_SCALE latents and keys are stored divided by it. TURNS, of `rotation_kernels`, rotates SIZE
    channels of what has positions; only with WRITE. Without WRITE the blocks of all sequences are
    counted through.
    """
    if EARLY:
        gdc_launch_dependents()
    block, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence = tl.program_id(2)
    if not WRITE:
        sequence, block = block_of(block, cu_seqlens_ptr, sequences, HEADS, BLOCK_M)
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    queries = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32) - start.to(tl.int32)
    length = tl.load(kv_lens_ptr + sequence)
    block = tl.cdiv(queries * HEADS, BLOCK_M) - 1 - block  # the longest rows start first
    if block < 0:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    position = length - queries + row // HEADS
    end = tl.minimum(length, length - queries + (block * BLOCK_M + BLOCK_M - 1) // HEADS + 1)
    share = _keys_per_split(0, end, splits, BLOCK_N)
    low = split * share
    high = tl.minimum(low + share, end)
    if low >= high:
        return
    seen_by_all = tl.minimum(high, length - queries + block * BLOCK_M // HEADS + 1)

    head, token = row % HEADS, start + row // HEADS
    real = row < queries * HEADS
    query_ptr += token * query_stride_token + head * query_stride_head
    query = load_rows(query_ptr, real, RANK, BLOCK_RANK, DOT_TYPE)
    rotated_ptr += token * rotated_stride_token + head * rotated_stride_head
    if TURNS:
        cos_ptr += start * cos_stride
        sin_ptr += start * sin_stride
        turned = tl.arange(0, BLOCK_ROPE)[None, :]
        rotated = load_turned(
            rotated_ptr[:, None], turned, real[:, None] & (turned < ROPE), cos_ptr, sin_ptr, SIZE, STEP, TURNS
        ).to(DOT_TYPE)  # fmt: skip
    else:
        rotated = load_rows(rotated_ptr, real, ROPE, BLOCK_ROPE, DOT_TYPE)
    k_scale = scale  # of no use without a scale
    if HAS_SCALE:
        k_scale = tl.load(k_scale_ptr)
        scale *= k_scale
    if WRITE:
        if high == length:
            store_new_latent(
                latent_ptr + start * latent_stride, key_ptr + start * key_stride, tl.load(slot_ptr + start), cache_ptr,
                k_scale, cos_ptr, sin_ptr, stride_page, stride_slot, HAS_SCALE, RANK, ROPE, PAGE,
                BLOCK_RANK, BLOCK_ROPE, SIZE, STEP, TURNS,
            )  # fmt: skip
        tl.debug_barrier()  # the threads that load the token are others
    peak, total, mixed = _attend_latents(
        query, rotated, position, low, high, seen_by_all, scale, block_table_ptr + sequence * table_stride, cache_ptr,
        stride_page, stride_slot, RANK, ROPE, PAGE, BLOCK_M, BLOCK_N, BLOCK_RANK, BLOCK_ROPE,
    )  # fmt: skip

    if HAS_SCALE:
        mixed *= k_scale
    target, channel = token * HEADS + head, tl.arange(0, BLOCK_RANK)
    if SPLIT:
        target = target * splits + split
        tl.store(lse_ptr + target, peak + tl.log2(total), mask=real)
    inside = real[:, None] & (channel < RANK)[None, :]
    place = out_ptr + target[:, None] * RANK + channel[None, :]
    tl.store(place, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)

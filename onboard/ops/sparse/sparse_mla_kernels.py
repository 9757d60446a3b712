# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels of latent attention to chosen keys over a paged cache (DeepSeek-V3.2, arXiv:2512.02556,
section 2.1).

Each token has keys of its own, so that a program has some heads of one token for its rows; with the
weights absorbed, keys and values are the latents (see `onboard.ops.latent_attention.mla_kernels`).
Keys that are not seen are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.attention.attention_kernels import LOG2E
from onboard.ops.latent_attention.mla_kernels import load_rows
from onboard.ops.triton.overlap import wait_for_inputs
from onboard.ops.triton.ragged_blocks import block_of

NOTHING = tl.constexpr(-1e30)
"""A peak below all scores, whose difference with itself is no NaN."""


@triton.jit
def _with_sink(peak, total, mixed, sinks_ptr, head, inside):
    """Let a logit of each head take weight and give nothing."""
    sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
    most = tl.maximum(peak, sink)
    decay = tl.exp2(peak - most)
    return total * decay + tl.exp2(sink - most), mixed * decay[:, None]


@triton.jit(do_not_specialize=["sequences"])
def sparse_mla_kernel(
    out_ptr, lse_ptr, query_ptr, rotated_ptr, indices_ptr, cu_seqlens_ptr, kv_lens_ptr, table_ptr, cache_ptr,
    sinks_ptr, scale, sequences, query_stride_token, query_stride_head, rotated_stride_token, rotated_stride_head,
    indices_stride, table_stride, stride_page, stride_slot,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, TOP_K: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, DECODE: tl.constexpr, DOT_TYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M heads of one token over one share of its keys: TOP_K chosen ones, with 0 all, of
    these those of the WINDOW.

    With SPLITS beyond one out is [tokens, heads, splits, rank] float32, and lse has the logarithm
    to base 2 of what each part was divided by.
    """
    sequence, index, split = tl.program_id(0), 0, tl.program_id(2)
    if not DECODE:
        sequence, index = block_of(sequence, cu_seqlens_ptr, sequences, 1, 1)
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    queries = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32) - start.to(tl.int32)
    if index >= queries:
        return
    token, position = start + index, tl.load(kv_lens_ptr + sequence) - queries + index
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = head < HEADS
    query_ptr += token * query_stride_token + head * query_stride_head
    query = load_rows(query_ptr, real, RANK, BLOCK_RANK, DOT_TYPE)
    rotated_ptr += token * rotated_stride_token + head * rotated_stride_head
    rotated = load_rows(rotated_ptr, real, ROPE, BLOCK_ROPE, DOT_TYPE)
    table_ptr += sequence * table_stride
    keys = position + 1
    if TOP_K > 0:
        keys = TOP_K
    elif WINDOW > 0:
        keys = tl.minimum(keys, WINDOW)
    share = tl.cdiv(tl.cdiv(keys, SPLITS), BLOCK_N) * BLOCK_N
    low = split * share
    high = tl.minimum(low + share, keys)
    peak = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    for tile in range(low, high, BLOCK_N):
        i = tile + tl.arange(0, BLOCK_N)
        at = position - i
        if TOP_K > 0:
            at = tl.load(indices_ptr + token * indices_stride + i, mask=i < high, other=-1).to(
                tl.int32
            )
        seen = (i < high) & (at >= 0) & (at <= position)
        if WINDOW > 0:
            seen &= at > position - WINDOW
        page = tl.load(table_ptr + at // PAGE, mask=seen, other=0).to(tl.int64)
        place = cache_ptr + page * stride_page + (at % PAGE) * stride_slot
        latents = load_rows(place, seen, RANK, BLOCK_RANK, DOT_TYPE)
        parts = load_rows(place + RANK, seen, ROPE, BLOCK_ROPE, DOT_TYPE)
        scores = tl.dot(rotated, tl.trans(parts), input_precision="ieee")
        scores = tl.dot(query, tl.trans(latents), scores, input_precision="ieee") * (scale * LOG2E)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        most = tl.maximum(peak, tl.max(scores, 1))
        weights, decay = tl.exp2(scores - most[:, None]), tl.exp2(peak - most)
        total = total * decay + tl.sum(weights, 1)
        mixed = tl.dot(
            weights.to(DOT_TYPE), latents, mixed * decay[:, None], input_precision="ieee"
        )
        peak = most
    target, channel = (token * HEADS + head) * SPLITS + split, tl.arange(0, BLOCK_RANK)
    if SPLITS > 1:
        tl.store(lse_ptr + target, peak + tl.log2(tl.maximum(total, 1e-30)), mask=real)
    elif HAS_SINKS:
        total, mixed = _with_sink(peak, total, mixed, sinks_ptr, head, real)
    mixed /= tl.where(total == 0.0, 1.0, total)[:, None]
    place = out_ptr + target[:, None] * RANK + channel[None, :]
    inside = real[:, None] & (channel < RANK)[None, :]
    tl.store(place, mixed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def join_kernel(
    out_ptr, parts_ptr, lse_ptr, sinks_ptr, HEADS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr, BLOCK_RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join BLOCK_RANK channels of the parts of one head of one token; those without keys weigh
    nothing.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_inputs(OVERLAP)
    channel = tl.program_id(2) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    row = (token * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    lse = tl.load(lse_ptr + row)
    peak = tl.maximum(tl.max(lse, 0), NOTHING)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(lse - peak)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    inside = (channel < RANK)[None, :]
    place = parts_ptr + row[:, None] * RANK + channel[None, :]
    parts = tl.load(place, mask=inside, other=0.0)
    mixed = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    place = out_ptr + (token * HEADS + head) * RANK + channel
    tl.store(place, mixed.to(out_ptr.dtype.element_ty), mask=channel < RANK)

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""The kernel of attention over a paged cache of latents.

With the weights of keys absorbed into the queries, all heads attend to one key a token, the latent and a rotated part,
and their values are the latents again (DeepSeek-V2, arXiv:2405.04434, section 2.1.2): a tile of the cache is read once
and used twice. The rows are the pairs of a query and a head; softmax and splits are those of `attention_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from onboard.ops.triton.attention_kernels import LOG2E, _keys_per_split, _store_new_token


@triton.jit
def _attend_latents(
    peak, total, mixed, query, rotated, position, low, high, scale, table_ptr, cache_ptr, stride_page, stride_slot,
    MASKED: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
):  # fmt: skip
    """Take the keys low..high of a sequence into the running peak and sum of weights, and the weighted sum of latents.

    Without MASKED, low..high are whole tiles that every row sees.
    """
    channel, turned = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    for tile in range(low, high, BLOCK_N):
        n = tile + tl.arange(0, BLOCK_N)
        stored = n < high
        page = tl.load(table_ptr + n // PAGE, mask=stored, other=0).to(tl.int64)
        place = cache_ptr + page * stride_page + (n % PAGE) * stride_slot
        inside = stored[:, None] & (channel < RANK)[None, :]
        latents = tl.load(place[:, None] + channel[None, :], mask=inside, other=0.0).to(query.dtype)
        inside = stored[:, None] & (turned < ROPE)[None, :]
        keys = tl.load(place[:, None] + RANK + turned[None, :], mask=inside, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rotated, tl.trans(keys), scores, input_precision="ieee") * (scale * LOG2E)
        if MASKED:
            scores = tl.where(stored[None, :] & (n[None, :] <= position[:, None]), scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        reference = new_peak
        if MASKED:  # a row may have seen nothing yet
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(peak - reference)
        total = total * decay + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(query.dtype), latents, mixed * decay[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, mixed


@triton.jit(do_not_specialize=["splits"])
def mla_kernel(
    out_ptr, lse_ptr, query_ptr, rotated_ptr, latent_ptr, key_ptr, cu_seqlens_ptr, kv_lens_ptr, block_table_ptr,
    slot_ptr, cache_ptr, scale, splits,
    query_stride_token, query_stride_head, rotated_stride_token, rotated_stride_head, latent_stride, key_stride,
    table_stride, stride_page, stride_slot,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, WRITE: tl.constexpr, DOT_TYPE: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M rows of one sequence over one of `splits` shares of its keys.

    WRITE and SPLIT as in `attention_kernel`; with SPLIT out is [tokens, heads, splits, rank] float32. With EARLY the
    kernel after it may be started now, and waits for this one.
    """
    if EARLY:
        gdc_launch_dependents()
    sequence = tl.program_id(1)
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    queries = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32) - start.to(tl.int32)
    length = tl.load(kv_lens_ptr + sequence)
    block = tl.cdiv(queries * HEADS, BLOCK_M) - 1 - block  # the longest rows start first
    if block < 0:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    position = length - queries + row // HEADS
    first_position = length - queries + block * BLOCK_M // HEADS
    end = tl.minimum(length, length - queries + (block * BLOCK_M + BLOCK_M - 1) // HEADS + 1)
    share = _keys_per_split(0, end, splits, BLOCK_N)
    low = split * share
    high = tl.minimum(low + share, end)
    if low >= high:
        return

    channel, turned = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    head, token = row % HEADS, start + row // HEADS
    real = row < queries * HEADS
    query_ptr += token[:, None] * query_stride_token + head[:, None] * query_stride_head + channel[None, :]
    query = tl.load(query_ptr, mask=real[:, None] & (channel < RANK)[None, :], other=0.0).to(DOT_TYPE)
    rotated_ptr += token[:, None] * rotated_stride_token + head[:, None] * rotated_stride_head + turned[None, :]
    rotated = tl.load(rotated_ptr, mask=real[:, None] & (turned < ROPE)[None, :], other=0.0).to(DOT_TYPE)
    table_ptr = block_table_ptr + sequence * table_stride
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    if WRITE:  # noqa: SIM102  (known when the kernel is compiled, the other not)
        if high == length:
            latent = tl.load(latent_ptr + start * latent_stride + channel, mask=channel < RANK, other=0.0)
            key = tl.load(key_ptr + start * key_stride + turned, mask=turned < ROPE, other=0.0)
            latent, key = latent.to(cache_ptr.dtype.element_ty), key.to(cache_ptr.dtype.element_ty)
            products = tl.sum(query.to(tl.float32) * latent.to(tl.float32)[None, :], 1)
            peak = (products + tl.sum(rotated.to(tl.float32) * key.to(tl.float32)[None, :], 1)) * (scale * LOG2E)
            total += 1.0
            mixed += latent.to(tl.float32)[None, :]
            slot = tl.load(slot_ptr + start)
            _store_new_token(cache_ptr, latent, slot, stride_page, stride_slot, channel, RANK, PAGE)
            _store_new_token(cache_ptr + RANK, key, slot, stride_page, stride_slot, turned, ROPE, PAGE)
            high -= 1
    whole = low + tl.maximum(tl.minimum(high, first_position + 1) - low, 0) // BLOCK_N * BLOCK_N
    peak, total, mixed = _attend_latents(
        peak, total, mixed, query, rotated, position, low, whole, scale, table_ptr, cache_ptr, stride_page, stride_slot,
        False, RANK, ROPE, PAGE, BLOCK_N, BLOCK_RANK, BLOCK_ROPE,
    )  # fmt: skip
    peak, total, mixed = _attend_latents(
        peak, total, mixed, query, rotated, position, whole, high, scale, table_ptr, cache_ptr, stride_page,
        stride_slot, True, RANK, ROPE, PAGE, BLOCK_N, BLOCK_RANK, BLOCK_ROPE,
    )  # fmt: skip

    target = token * HEADS + head
    if SPLIT:
        target = target * splits + split
        tl.store(lse_ptr + target, peak + tl.log2(total), mask=real)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    inside = real[:, None] & (channel < RANK)[None, :]
    tl.store(out_ptr + target[:, None] * RANK + channel[None, :], mixed.to(out_ptr.dtype.element_ty), mask=inside)

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels of attention over a paged cache.

One online-softmax kernel (FlashAttention-2, Dao 2023, arXiv:2307.08691) serves all steps. Its rows
are the pairs of a query and a query head that share a key head, so a page is read once for the
whole group and decode fills a matrix tile. In decode the keys of a sequence are dealt out to
several programs (Flash-Decoding, Dao et al. 2023), whose parts `combine_kernel` joins. Scores are
kept times log2(e), because the hardware has 2^x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.attention.rotation_kernels import load_turned
from onboard.ops.triton.overlap import wait_for_inputs
from onboard.ops.triton.ragged_blocks import block_of

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def as_stored(x, ELEMENT: tl.constexpr):
    """Return x rounded to a cache's element type; float8_e4m3fn has no infinity: what is too large
    is its largest.
    """
    if ELEMENT == tl.float8e4nv:  # noqa: SIM300  (the type is no constant to ruff)
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    return x.to(ELEMENT)


@triton.jit
def write_cache_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr,
    key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    k_stride_page, k_stride_head, k_stride_slot, v_stride_page, v_stride_head, v_stride_slot,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, SCALES: tl.constexpr = None,
):  # fmt: skip
    """Store all key and value heads of one token in its slot; SCALES is the number of scales that they
    are divided by, None for none.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    page, offset = slot // PAGE, slot % PAGE
    i = tl.arange(0, BLOCK_KEY)
    head, channel = i // DIM, i % DIM
    key = tl.load(
        key_ptr + token * key_stride_token + head * key_stride_head + channel, mask=head < KV_HEADS
    )
    if SCALES is not None:
        key /= tl.load(k_scale_ptr + head % SCALES)
    place = page * k_stride_page + head * k_stride_head + offset * k_stride_slot + channel
    tl.store(
        k_cache_ptr + place, as_stored(key, k_cache_ptr.dtype.element_ty), mask=head < KV_HEADS
    )
    i = tl.arange(0, BLOCK_VALUE)
    head, channel = i // VALUE_DIM, i % VALUE_DIM
    value = tl.load(
        value_ptr + token * value_stride_token + head * value_stride_head + channel,
        mask=head < KV_HEADS,
    )
    if SCALES is not None:
        value /= tl.load(v_scale_ptr + head % SCALES)
    place = page * v_stride_page + head * v_stride_head + offset * v_stride_slot + channel
    tl.store(
        v_cache_ptr + place, as_stored(value, v_cache_ptr.dtype.element_ty), mask=head < KV_HEADS
    )


@triton.jit
def _oldest_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first key that a query at this position sees, one of which is bounded."""
    if WINDOW is None:
        return position // CHUNK * CHUNK
    elif CHUNK is None:
        return tl.maximum(position - WINDOW + 1, 0)
    else:
        return tl.maximum(position - WINDOW + 1, position // CHUNK * CHUNK)


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the start of the first tile of keys that a query at this position sees."""
    if WINDOW is None and CHUNK is None:
        return 0
    else:
        return _oldest_key(position, WINDOW, CHUNK) // BLOCK_N * BLOCK_N


@triton.jit
def _keys_per_split(first, end, splits, BLOCK_N: tl.constexpr):
    """Return how many keys, in whole tiles, each split takes so that all of them share the work."""
    return tl.cdiv(tl.cdiv(end - first, BLOCK_N), splits) * BLOCK_N


@triton.jit
def _logits(products, scale, LOGIT_CAP: tl.constexpr):
    """Return scaled, capped scores times log2(e)."""
    if LOGIT_CAP is None:
        return products * (scale * LOG2E)
    else:  # tanh(x) = 2 sigmoid(2 x) - 1
        return (LOGIT_CAP * LOG2E) * (2.0 * tl.sigmoid(products * (scale * 2.0 / LOGIT_CAP)) - 1.0)


@triton.jit
def _store_new_token(
    cache_ptr, new, slot, stride_page, stride_slot, channel, SIZE: tl.constexpr, PAGE: tl.constexpr
):
    """Store one head of one token in its slot."""
    place = cache_ptr + (slot // PAGE) * stride_page + (slot % PAGE) * stride_slot
    tl.store(place + channel, new, mask=channel < SIZE)


@triton.jit
def _attend_tiles(
    peak, total, mixed, query, position, slope, low, high, scale, table_ptr, k_ptr, v_ptr,
    k_stride_page, k_stride_slot, v_stride_page, v_stride_slot,
    MASKED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, LOGIT_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Take the keys low..high of a sequence into the running peak and sum of weights, and the
    weighted sum of values.

    Without MASKED, low..high are whole tiles that every row sees. `slope` is ALiBi's of each row,
    times log2(e). Keys of the first tile that no row sees are not read: their pages are others' by
    now, and may hold what is no number.
    """
    channel, value_channel = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    oldest = low
    if WINDOW is not None or CHUNK is not None:
        oldest = _oldest_key(tl.min(position, 0), WINDOW, CHUNK)
    n = low + tl.arange(0, BLOCK_N)
    page = tl.load(table_ptr + n // PAGE, mask=(n < high) & (n >= oldest), other=0).to(tl.int64)
    for tile in range(low, high, BLOCK_N):
        n = tile + tl.arange(0, BLOCK_N)
        stored = (n < high) & (n >= oldest)
        # Where the next keys are is known by the time that they are asked for
        then = n + BLOCK_N
        next_page = tl.load(table_ptr + then // PAGE, mask=then < high, other=0).to(tl.int64)
        place = page * k_stride_page + (n % PAGE) * k_stride_slot
        inside = stored[:, None] & (channel < DIM)[None, :]
        keys = tl.load(k_ptr + place[:, None] + channel[None, :], mask=inside, other=0.0).to(
            query.dtype
        )
        place = page * v_stride_page + (n % PAGE) * v_stride_slot
        inside = stored[:, None] & (value_channel < VALUE_DIM)[None, :]
        values = tl.load(
            v_ptr + place[:, None] + value_channel[None, :], mask=inside, other=0.0
        ).to(query.dtype)
        scores = _logits(tl.dot(query, tl.trans(keys), input_precision="ieee"), scale, LOGIT_CAP)
        if HAS_SLOPES:  # after the cap
            scores += slope[:, None] * (n[None, :] - position[:, None]).to(tl.float32)
        if MASKED:
            seen = stored[None, :] & (n[None, :] <= position[:, None])
            if WINDOW is not None or CHUNK is not None:
                seen = seen & (n[None, :] >= _oldest_key(position, WINDOW, CHUNK)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        reference = new_peak
        if MASKED:  # a row may have seen nothing yet
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(peak - reference)
        total = total * decay + tl.sum(weights, 1)
        mixed = tl.dot(
            weights.to(query.dtype), values, mixed * decay[:, None], input_precision="ieee"
        )
        peak, page = new_peak, next_page
    return peak, total, mixed


@triton.jit
def _take_new_token(
    peak, total, mixed, query, high, length, scale, slot_ptr, key_ptr, value_ptr, k_cache_ptr, v_cache_ptr,
    k_scale, v_scale, cos_ptr, sin_ptr, k_stride_page, k_stride_slot, v_stride_page, v_stride_slot,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, LOGIT_CAP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, SCALES: tl.constexpr,
    SIZE: tl.constexpr, STEP: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """If the last of the keys up to `high` is the sequence's new one, store it, and take it in as
    the first.

    Return the running peak, sum of weights and weighted sum of values, and the end of the keys that
    are left.
    """
    channel, value_channel = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    if TURNS:
        key = load_turned(key_ptr, channel, channel < DIM, cos_ptr, sin_ptr, SIZE, STEP, TURNS)
    else:
        key = tl.load(key_ptr + channel, mask=channel < DIM, other=0.0)
    value = tl.load(value_ptr + value_channel, mask=value_channel < VALUE_DIM, other=0.0)
    if SCALES is not None:
        key, value = key / k_scale, value / v_scale
    key = as_stored(key, k_cache_ptr.dtype.element_ty)
    value = as_stored(value, v_cache_ptr.dtype.element_ty)
    if high == length:
        products = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1)
        peak = _logits(products, scale, LOGIT_CAP)
        total += 1.0
        mixed += value.to(tl.float32)[None, :]
        slot = tl.load(slot_ptr)
        _store_new_token(k_cache_ptr, key, slot, k_stride_page, k_stride_slot, channel, DIM, PAGE)
        _store_new_token(
            v_cache_ptr, value, slot, v_stride_page, v_stride_slot, value_channel, VALUE_DIM, PAGE
        )
        high -= 1
    return peak, total, mixed, high


@triton.jit
def _keys_of_block(
    first_position, last_position, length, split, splits,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the first and the end of the keys that queries at these positions see, of one of
    `splits` shares.
    """
    first, end = (
        _first_key(first_position, WINDOW, CHUNK, BLOCK_N),
        tl.minimum(length, last_position + 1),
    )
    share = _keys_per_split(first, end, splits, BLOCK_N)
    low = first + split * share
    return low, tl.minimum(low + share, end)


@triton.jit
def _store_rows(
    peak, total, mixed, out_ptr, lse_ptr, sinks_ptr, out_scale_ptr, target, head, real, split, splits,
    VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Store what the running sums come to, and with SPLIT how much it weighs; sinks are counted, and
    with CODES a scale divided by, once, in the end.
    """
    if SPLIT:
        target = target * splits + split
        tl.store(lse_ptr + target, peak + tl.log2(total), mask=real)
    elif HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        new_peak = tl.maximum(peak, sink)
        total = total * tl.exp2(peak - new_peak) + tl.exp2(sink - new_peak)
        mixed *= tl.exp2(peak - new_peak)[:, None]
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    if CODES and not SPLIT:
        mixed /= tl.load(out_scale_ptr)
    channel = tl.arange(0, BLOCK_VALUE)
    inside = real[:, None] & (channel < VALUE_DIM)[None, :]
    tl.store(
        out_ptr + target[:, None] * VALUE_DIM + channel[None, :],
        as_stored(mixed, out_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["splits", "sequences"])
def attention_kernel(
    out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, cu_seqlens_ptr, kv_lens_ptr, block_table_ptr, slot_ptr,
    k_cache_ptr, v_cache_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, out_scale_ptr, cos_ptr, sin_ptr,
    scale, splits, sequences, cos_stride, sin_stride,
    query_stride_token, query_stride_head, key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    table_stride, k_stride_page, k_stride_head, k_stride_slot, v_stride_page, v_stride_head, v_stride_slot,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, LOGIT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    SPLIT: tl.constexpr, WRITE: tl.constexpr, MASK_ALL: tl.constexpr, DOT_TYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    SCALES: tl.constexpr = None, CODES: tl.constexpr = False,
    SIZE: tl.constexpr = 0, STEP: tl.constexpr = 1, TURNS: tl.constexpr = 0, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Attend BLOCK_M rows of one sequence and one key head over one of `splits` shares of its keys.

    With WRITE each sequence has one new token: the program whose share holds it stores it, and
    takes it from the arguments, not from the cache, so that no program waits for another. With
    SPLIT out is [tokens, heads, splits, value_dim] float32 of parts, each normalised by itself, and
    lse the base-2 logarithm of what each was divided by. With MASK_ALL all tiles take the same
    instructions, those that need no mask, too. SCALES is the number of scales that the cache's keys
    and values have, None for none: they are factors of the scores, and of what is mixed. With CODES
    the result is eight-bit floats, divided by a scale. TURNS, of `rotation_kernels`, rotates SIZE
    channels of the query and of the new token's key; only with WRITE. Without WRITE the blocks of
    all sequences are counted through, and there are no shares.
    """
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    if not WRITE:
        sequence, block = block_of(tl.program_id(0), cu_seqlens_ptr, sequences, GROUP, BLOCK_M)
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    queries = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32) - start.to(tl.int32)
    length = tl.load(kv_lens_ptr + sequence)
    block = tl.cdiv(queries * GROUP, BLOCK_M) - 1 - block  # the longest rows start first
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    position = length - queries + row // GROUP
    first_position = length - queries + block * BLOCK_M // GROUP
    last_position = length - queries + (block * BLOCK_M + BLOCK_M - 1) // GROUP
    low, high = _keys_of_block(
        first_position, last_position, length, split, splits, WINDOW, CHUNK, BLOCK_N
    )
    wait_for_inputs(OVERLAP)
    if (block < 0) | (low >= high):
        return

    channel = tl.arange(0, BLOCK_DIM)
    head, token, real = kv_head * GROUP + row % GROUP, start + row // GROUP, row < queries * GROUP
    query_ptr += token[:, None] * query_stride_token + head[:, None] * query_stride_head
    inside = real[:, None] & (channel < DIM)[None, :]
    if TURNS:
        cos_ptr += start * cos_stride
        sin_ptr += start * sin_stride
        query = load_turned(
            query_ptr, channel[None, :], inside, cos_ptr, sin_ptr, SIZE, STEP, TURNS
        ).to(DOT_TYPE)
    else:
        query = tl.load(query_ptr + channel[None, :], mask=inside, other=0.0).to(DOT_TYPE)
    slope = position.to(tl.float32)  # of no use without slopes
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2E
    table_ptr = block_table_ptr + sequence * table_stride
    k_cache_ptr += kv_head * k_stride_head
    v_cache_ptr += kv_head * v_stride_head
    peak, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    k_scale = scale  # of no use without scales
    v_scale = scale
    if SCALES is not None:
        k_scale = tl.load(k_scale_ptr + kv_head % SCALES)
        v_scale = tl.load(v_scale_ptr + kv_head % SCALES)
        scale *= k_scale
    if WRITE:
        peak, total, mixed, high = _take_new_token(
            peak, total, mixed, query, high, length, scale, slot_ptr + start,
            key_ptr + start * key_stride_token + kv_head * key_stride_head,
            value_ptr + start * value_stride_token + kv_head * value_stride_head, k_cache_ptr, v_cache_ptr,
            k_scale, v_scale, cos_ptr, sin_ptr, k_stride_page, k_stride_slot, v_stride_page, v_stride_slot,
            DIM, VALUE_DIM, PAGE, LOGIT_CAP, BLOCK_DIM, BLOCK_VALUE, SCALES, SIZE, STEP, TURNS,
        )  # fmt: skip
    elif WINDOW is None and CHUNK is None and not MASK_ALL:
        whole = low + tl.maximum(tl.minimum(high, first_position + 1) - low, 0) // BLOCK_N * BLOCK_N
        peak, total, mixed = _attend_tiles(
            peak, total, mixed, query, position, slope, low, whole, scale, table_ptr, k_cache_ptr, v_cache_ptr,
            k_stride_page, k_stride_slot, v_stride_page, v_stride_slot,
            False, DIM, VALUE_DIM, PAGE, WINDOW, CHUNK, LOGIT_CAP, HAS_SLOPES, BLOCK_N, BLOCK_DIM, BLOCK_VALUE,
        )  # fmt: skip
        low = whole
    peak, total, mixed = _attend_tiles(
        peak, total, mixed, query, position, slope, low, high, scale, table_ptr, k_cache_ptr, v_cache_ptr,
        k_stride_page, k_stride_slot, v_stride_page, v_stride_slot,
        True, DIM, VALUE_DIM, PAGE, WINDOW, CHUNK, LOGIT_CAP, HAS_SLOPES, BLOCK_N, BLOCK_DIM, BLOCK_VALUE,
    )  # fmt: skip

    if SCALES is not None:
        mixed *= v_scale
    _store_rows(
        peak, total, mixed, out_ptr, lse_ptr, sinks_ptr, out_scale_ptr, token * (KV_HEADS * GROUP) + head, head, real,
        split, splits, VALUE_DIM, BLOCK_VALUE, HAS_SINKS, SPLIT, CODES,
    )  # fmt: skip


@triton.jit
def combine_kernel(
    out_ptr, parts_ptr, lse_ptr, cu_seqlens_ptr, kv_lens_ptr, sinks_ptr, out_scale_ptr,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_VALUE: tl.constexpr, CODES: tl.constexpr = False,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Join BLOCK_VALUE channels of the parts of one head of one decoding sequence.

    Each part is weighted by what it was divided by.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(OVERLAP)
    token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    if tl.load(cu_seqlens_ptr + sequence + 1) == token:
        return
    length = tl.load(kv_lens_ptr + sequence)
    first = _first_key(length - 1, WINDOW, CHUNK, BLOCK_N)
    share = _keys_per_split(first, length, SPLITS, BLOCK_N)
    split, channel = (
        tl.arange(0, SPLITS),
        tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE),
    )
    used = split * share < length - first
    row = (token * HEADS + head) * SPLITS + split
    lse = tl.load(lse_ptr + row, mask=used, other=float("-inf"))
    peak = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(lse - peak)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    inside = used[:, None] & (channel < VALUE_DIM)[None, :]
    parts = tl.load(parts_ptr + row[:, None] * VALUE_DIM + channel[None, :], mask=inside, other=0.0)
    mixed = tl.sum(parts * weights[:, None], 0) / total
    if CODES:
        mixed /= tl.load(out_scale_ptr)
    target = out_ptr + (token * HEADS + head) * VALUE_DIM + channel
    tl.store(target, as_stored(mixed, out_ptr.dtype.element_ty), mask=channel < VALUE_DIM)

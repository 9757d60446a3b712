# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels of recurrences in which no two channels meet: the diagonal linear recurrence, WKV and the
token shift.

A program goes through the tokens of one sequence for BLOCK_C channels, CHUNK at a time: what a chunk
makes of any state is found by a parallel scan (Blelloch 1990), and the state is carried from chunk
to chunk. Tokens beyond the last change nothing. In decode a chunk is one token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.recurrences.triton_state import span
from onboard.ops.triton.overlap import wait_for_inputs


@triton.jit
def _last(tile, CHUNK: tl.constexpr):
    """Return the last row of [CHUNK, channels]."""
    return tl.sum(tl.where(tl.arange(0, CHUNK)[:, None] == CHUNK - 1, tile, 0.0), 0)


@triton.jit
def _decayed(left, x, later_left, later_x):
    """Join two spans of a linear recurrence."""
    return left * later_left, x * later_left + later_x


@triton.jit
def linear_recurrence_kernel(
    out_ptr, x_ptr, decay_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr, x_stride, decay_stride, cache_stride,
    CHANNELS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Each state is what the decay leaves of the one before it, and x (arXiv:2402.19427, equation
    4).
    """
    start, tokens, continues, slot = span(tl.program_id(1), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    channel, row = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, CHUNK)
    real = channel < CHANNELS
    cache_ptr += slot * cache_stride + channel
    state = tl.load(cache_ptr, mask=real & continues, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP, START_NEXT=False)  # the state is that of an earlier step
    for first in tl.range(0, tokens, CHUNK, num_stages=2):
        token, inside = start + first + row, (first + row < tokens)[:, None] & real[None, :]
        place = token[:, None] * x_stride + channel[None, :]
        out = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        place = token[:, None] * decay_stride + channel[None, :]
        left = tl.load(decay_ptr + place, mask=inside, other=1.0).to(tl.float32)
        if CHUNK > 1:
            left, out = tl.associative_scan((left, out), 0, _decayed)
        out += left * state[None, :]
        place = token[:, None] * CHANNELS + channel[None, :]
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)
        state = _last(out, CHUNK)
    tl.debug_barrier()  # every thread has read the old state
    tl.store(cache_ptr, state, mask=real)


@triton.jit
def _with(total, weight, scale, later_total, later_weight, later_scale):
    """Add up weighted values and weights, both divided by exp(scale)."""
    most = tl.maximum(scale, later_scale)
    old, new = tl.exp(scale - most), tl.exp(later_scale - most)
    return old * total + new * later_total, old * weight + new * later_weight, most


@triton.jit
def _faded(
    total, weight, scale, fading, later_total, later_weight, later_scale, later_fading
):  # fmt: skip
    """Join the sums of two spans of tokens, of which the earlier fade as the later take."""
    sums = _with(total, weight, scale - later_fading, later_total, later_weight, later_scale)
    return sums[0], sums[1], sums[2], fading + later_fading


@triton.jit
def wkv_kernel(
    out_ptr, key_ptr, value_ptr, decay_ptr, first_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr,
    key_stride, value_stride, cache_stride,
    CHANNELS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Average values with weights that fade (arXiv:2305.13048, equation 16 and appendix D).

    Row r of a chunk's scan is the state in front of its token r: row 0 begins with the state that is
    carried. Nothing has a scale of NOTHING, with which differences are no NaN.
    """
    NOTHING: tl.constexpr = -1e30
    start, tokens, continues, slot = span(tl.program_id(1), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    channel, row = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, CHUNK)
    real = channel < CHANNELS
    cache_ptr += slot * cache_stride + channel
    old = real & continues
    total = tl.load(cache_ptr, mask=old, other=0.0).to(tl.float32)
    weight = tl.load(cache_ptr + CHANNELS, mask=old, other=0.0).to(tl.float32)
    scale = tl.load(cache_ptr + 2 * CHANNELS, mask=old, other=0.0).to(tl.float32)
    scale = tl.where(weight == 0, NOTHING, scale)
    wait_for_inputs(OVERLAP, START_NEXT=False)  # the state is that of an earlier step
    fading = tl.exp(tl.load(decay_ptr + channel, mask=real, other=0.0).to(tl.float32))
    bonus = tl.load(first_ptr + channel, mask=real, other=0.0).to(tl.float32)
    key_ptr += start * key_stride + channel[None, :]
    value_ptr += start * value_stride + channel[None, :]
    for first in range(0, tokens, CHUNK):
        token = (first + row)[:, None]
        inside = (token < tokens) & real[None, :]
        key = tl.load(key_ptr + token * key_stride, mask=inside, other=0.0).to(tl.float32)
        key = tl.where(inside, key, NOTHING)
        value = tl.load(value_ptr + token * value_stride, mask=inside, other=0.0).to(tl.float32)
        totals, weights, scales = total[None, :], weight[None, :], scale[None, :]
        if CHUNK > 1:
            before = (row > 0)[:, None] & (token <= tokens) & real[None, :]
            keys = tl.load(key_ptr + (token - 1) * key_stride, mask=before, other=0.0)
            values = tl.load(value_ptr + (token - 1) * value_stride, mask=before, other=0.0)
            carried = (row == 0)[:, None]
            totals = tl.where(carried, totals, values.to(tl.float32))
            weights = tl.where(carried, weights, before.to(tl.float32))
            scales = tl.where(carried, scales, tl.where(before, keys.to(tl.float32), NOTHING))
            fades = tl.where(before, fading[None, :], 0.0)
            totals, weights, scales, _ = tl.associative_scan(
                (totals, weights, scales, fades), 0, _faded
            )
        sums = _with(totals, weights, scales, value, 1.0, key + bonus[None, :])
        place = (start + token) * CHANNELS + channel[None, :]
        tl.store(out_ptr + place, (sums[0] / sums[1]).to(out_ptr.dtype.element_ty), mask=inside)
        here = inside.to(tl.float32)
        faded = scales - here * fading[None, :]
        totals, weights, scales = _with(totals, weights, faded, value, here, key)
        total, weight, scale = _last(totals, CHUNK), _last(weights, CHUNK), _last(scales, CHUNK)
    tl.debug_barrier()  # every thread has read the old state
    tl.store(cache_ptr, total, mask=real)
    tl.store(cache_ptr + CHANNELS, weight, mask=real)
    tl.store(cache_ptr + 2 * CHANNELS, scale, mask=real)


@triton.jit
def token_shift_kernel(
    out_ptr, x_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr, x_stride, cache_stride,
    CHANNELS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write what comes before each of CHUNK tokens; a sequence's first program alone reads and writes
    the state.
    """
    start, tokens, continues, slot = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    first = tl.program_id(0) * CHUNK
    wait_for_inputs(OVERLAP, START_NEXT=False)
    if first >= tokens:
        return
    channel, token = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), first + tl.arange(0, CHUNK)
    real, token = channel < CHANNELS, token[:, None]
    cache_ptr += slot * cache_stride + channel
    x_ptr += start * x_stride + channel
    inside = (token < tokens) & real[None, :]
    state = tl.load(cache_ptr, mask=real & continues & (first == 0), other=0.0)
    before = tl.load(x_ptr[None, :] + (token - 1) * x_stride, mask=inside & (token > 0), other=0.0)
    out = tl.where(token == 0, state[None, :].to(before.dtype), before)
    tl.store(out_ptr + (start + token) * CHANNELS + channel[None, :], out, mask=inside)
    last = tl.load(x_ptr + (tokens - 1) * x_stride, mask=real & (first == 0), other=0.0)
    tl.debug_barrier()  # every thread has read the old state
    tl.store(cache_ptr, last.to(state.dtype), mask=real & (first == 0))

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels of the matrix LSTM (Beck et al. 2024, arXiv:2405.04517; 2025, arXiv:2503.14376).

A program keeps BLOCK_V value channels of one head's memory in registers; the norm is one channel
more, of values of one. No two channels meet but in the division by what the norm gives, which is
therefore another kernel's: the first writes sums, [tokens, heads, VALUE + 2], of all channels, of
the norm, and last the logarithm m of their scale. The last row of a state has m once for each
channel, so that no program reads what another writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.recurrences.triton_state import softplus, span
from onboard.ops.triton.overlap import wait_for_inputs


@triton.jit
def _place(
    cache_ptr,
    slot,
    head,
    cache_stride,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return pointers to the first of a program's channels in a head's memory and in its last row."""
    cache_ptr += slot * cache_stride + head * ((KEY + 1) * (VALUE + 1)) + tl.program_id(0) * BLOCK_V
    return cache_ptr, cache_ptr + KEY * (VALUE + 1)


@triton.jit
def _store_sums(
    sums_ptr, row, sums, scale, value, inside, HEADS: tl.constexpr, VALUE: tl.constexpr
):  # fmt: skip
    """Store sums of a program's channels, and, beside that of the norm, the scale; `row` counts heads
    of tokens.
    """
    place = sums_ptr + row * (VALUE + 2) + value
    tl.store(place, sums, mask=inside & (value <= VALUE))
    tl.store(place + 1, scale, mask=inside & (value == VALUE))


@triton.jit
def mlstm_step_kernel(
    sums_ptr, q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr,
    q_stride_token, q_stride_head, k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    i_stride_token, f_stride_token, cache_stride, scale,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take the new tokens of one sequence, one by one, into BLOCK_V channels of one head's memory."""
    head = tl.program_id(1)
    start, tokens, continues, slot = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    key, lane = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    value = tl.program_id(0) * BLOCK_V + lane
    cache_ptr, row_ptr = _place(cache_ptr, slot, head, cache_stride, KEY, VALUE, BLOCK_V)
    cache_ptr += key[:, None] * (VALUE + 1) + lane[None, :]
    kept = (key < KEY)[:, None] & (value <= VALUE)[None, :]
    memory = tl.load(cache_ptr, mask=kept & continues, other=0.0)
    m = tl.load(row_ptr, mask=continues, other=0.0)
    wait_for_inputs(OVERLAP, START_NEXT=False)  # the state is that of an earlier step
    for index in range(tokens):
        token = start + index
        place = token * q_stride_token + head * q_stride_head + key
        q = tl.load(q_ptr + place, mask=key < KEY, other=0.0).to(tl.float32) * scale
        place = token * k_stride_token + head * k_stride_head + key
        k = tl.load(k_ptr + place, mask=key < KEY, other=0.0).to(tl.float32)
        place = token * v_stride_token + head * v_stride_head + value
        v = tl.load(v_ptr + place, mask=value < VALUE, other=1.0).to(tl.float32)
        gate = tl.load(i_ptr + token * i_stride_token + head).to(tl.float32)
        before = m - softplus(-tl.load(f_ptr + token * f_stride_token + head).to(tl.float32))
        m = tl.maximum(before, gate)
        memory = memory * tl.exp(before - m) + k[:, None] * (v * tl.exp(gate - m))[None, :]
        sums = tl.sum(memory * q[:, None], 0)
        _store_sums(sums_ptr, token * HEADS + head, sums, m, value, True, HEADS, VALUE)
    tl.debug_barrier()  # every thread has read the old state
    tl.store(cache_ptr, memory, mask=kept)
    tl.store(row_ptr + lane, m + tl.zeros([BLOCK_V], tl.float32), mask=value <= VALUE)


@triton.jit
def mlstm_chunk_kernel(
    sums_ptr, q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr,
    q_stride_token, q_stride_head, k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    i_stride_token, f_stride_token, cache_stride, scale,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, DOT_TYPE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Take the new tokens of one sequence, chunk by chunk, into BLOCK_V channels of one head's
    memory; operands of products have DOT_TYPE.

    Tokens beyond the last leave everything as it is, and bring nothing.
    """
    head = tl.program_id(1)
    start, tokens, continues, slot = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    row, key, lane = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    value = tl.program_id(0) * BLOCK_V + lane
    cache_ptr, row_ptr = _place(cache_ptr, slot, head, cache_stride, KEY, VALUE, BLOCK_V)
    cache_ptr += key[:, None] * (VALUE + 1) + lane[None, :]
    kept = (key < KEY)[:, None] & (value <= VALUE)[None, :]
    memory = tl.load(cache_ptr, mask=kept & continues, other=0.0)
    m = tl.load(row_ptr, mask=continues, other=0.0)
    for first in range(0, tokens, CHUNK):
        token, inside = start + first + row, first + row < tokens
        keys = inside[:, None] & (key < KEY)[None, :]
        place = token[:, None] * q_stride_token + head * q_stride_head + key[None, :]
        q = tl.load(q_ptr + place, mask=keys, other=0.0).to(DOT_TYPE)
        place = token[:, None] * k_stride_token + head * k_stride_head + key[None, :]
        k = tl.load(k_ptr + place, mask=keys, other=0.0).to(DOT_TYPE)
        place = token[:, None] * v_stride_token + head * v_stride_head + value[None, :]
        values = inside[:, None] & (value < VALUE)[None, :]
        v = tl.load(v_ptr + place, mask=values, other=1.0).to(tl.float32)
        gate = tl.load(i_ptr + token * i_stride_token + head, mask=inside, other=0.0)
        gate = tl.where(inside, gate.to(tl.float32), float("-inf"))
        gone = tl.load(f_ptr + token * f_stride_token + head, mask=inside, other=0.0)
        gone = tl.where(inside, softplus(-gone.to(tl.float32)), 0.0)
        total, last = -tl.cumsum(gone, 0), -tl.sum(gone, 0)
        between = tl.where(
            row[None, :] <= row[:, None],
            total[:, None] - total[None, :] + gate[None, :],
            float("-inf"),
        )
        before = total + m
        most = tl.maximum(before, tl.max(between, 1))
        weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weights *= tl.exp(between - most[:, None])
        sums = tl.dot(q, memory.to(DOT_TYPE), input_precision=PRECISION)
        sums *= tl.exp(before - most)[:, None]
        sums = tl.dot(weights.to(DOT_TYPE), v.to(DOT_TYPE), sums, input_precision=PRECISION)
        _store_sums(
            sums_ptr, (token * HEADS + head)[:, None], sums * scale, most[:, None], value[None, :],
            inside[:, None], HEADS, VALUE,
        )  # fmt: skip
        after = tl.sum(tl.where(row == CHUNK - 1, most, 0.0), 0)
        added = v * tl.exp(last - total + gate - after)[:, None]
        memory *= tl.exp(last + m - after)
        memory = tl.dot(tl.trans(k), added.to(DOT_TYPE), memory, input_precision=PRECISION)
        m = after
    tl.debug_barrier()  # every thread has read the old state
    tl.store(cache_ptr, memory, mask=kept)
    tl.store(row_ptr + lane, m + tl.zeros([BLOCK_V], tl.float32), mask=value <= VALUE)


@triton.jit
def mlstm_divide_kernel(
    out_ptr, sums_ptr, eps, VALUE: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Divide the sums of one head of one token by that of the norm, or the scale's inverse if that is
    larger.
    """
    row, value = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_V)
    wait_for_inputs(OVERLAP)
    sums_ptr += row * (VALUE + 2)
    norm, m = tl.load(sums_ptr + VALUE), tl.load(sums_ptr + VALUE + 1)
    sums = tl.load(sums_ptr + value, mask=value < VALUE, other=0.0)
    out = sums / (tl.maximum(tl.abs(norm), tl.exp(-m)) + eps)
    tl.store(out_ptr + row * VALUE + value, out.to(out_ptr.dtype.element_ty), mask=value < VALUE)

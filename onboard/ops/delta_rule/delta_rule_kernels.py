# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels of the delta rule: gated or not (Yang et al. 2024, arXiv:2412.06464; arXiv:2406.06484), or
with a gate of each key channel (Kimi Team 2025, arXiv:2510.26692).

A program keeps the state of one head, or a slice of its value channels, in registers: no two slices
meet. Decode goes from token to token. Otherwise tokens come in chunks: `delta_solve_kernel` inverts
each chunk's triangular system (the WY form, section 3.3 of the first), for all chunks at once, and
`delta_chunk_kernel` carries the state along. GATE says what a decay is of: "", "head" or "channel",
for which `kda_products_kernel` has written systems and weights before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.recurrences.triton_state import pairwise_decay, span
from onboard.ops.triton.overlap import wait_for_inputs


@triton.jit
def unit(x, axis: tl.constexpr):
    """Scale vectors along an axis to length one, as `torch_l2norm` does."""
    length = tl.rsqrt(tl.sum(x * x, axis) + 1e-6)
    return x * tl.expand_dims(length, axis)


@triton.jit
def load_tile(ptr, row, column, mask):
    """Return [rows, columns] in float32, zeros outside the mask; `row` are offsets."""
    return tl.load(ptr + row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_chunk(ptr, token, stride, inside):
    """Return one number a token in float32, zeros outside."""
    return tl.load(ptr + token * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def delta_step_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr, scale,
    q_stride_token, q_stride_head, k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    g_stride_token, g_stride_head, beta_stride_token, cache_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, GATE: tl.constexpr,
    NORMALISE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take the new tokens of one sequence, one by one, into BLOCK_V value channels of one head's
    state.
    """
    head = tl.program_id(1)
    start, tokens, continues, slot = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < KEY)[:, None] & (value < VALUE)[None, :]
    cache_ptr += slot * cache_stride + head * (KEY * VALUE) + key[:, None] * VALUE + value[None, :]
    state = tl.load(cache_ptr, mask=inside & continues, other=0.0)
    wait_for_inputs(OVERLAP, START_NEXT=False)  # the state is that of an earlier step
    q_ptr += start * q_stride_token + head // GROUP * q_stride_head + key
    k_ptr += start * k_stride_token + head // GROUP * k_stride_head + key
    v_ptr += start * v_stride_token + head * v_stride_head + value
    beta_ptr += start * beta_stride_token + head
    out_ptr += (start * HEADS + head) * VALUE + value
    if GATE != "":
        g_ptr += start * g_stride_token + head * g_stride_head
    for token in range(tokens):
        q = tl.load(q_ptr + token * q_stride_token, mask=key < KEY, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * k_stride_token, mask=key < KEY, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_stride_token, mask=value < VALUE, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * beta_stride_token).to(tl.float32)
        if NORMALISE:
            q, k = unit(q, 0), unit(k, 0)
        if GATE == "head":
            state *= tl.exp(tl.load(g_ptr + token * g_stride_token).to(tl.float32))
        if GATE == "channel":
            g = tl.load(g_ptr + token * g_stride_token + key, mask=key < KEY, other=0.0)
            state *= tl.exp(g.to(tl.float32))[:, None]
        correction = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * correction[None, :]
        out = tl.sum(state * (q * scale)[:, None], 0)
        tl.store(
            out_ptr + token * (HEADS * VALUE), out.to(out_ptr.dtype.element_ty), mask=value < VALUE
        )
    tl.store(cache_ptr, state, mask=inside)


@triton.jit
def delta_solve_kernel(
    inverse_ptr, k_ptr, g_ptr, beta_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr,
    k_stride_token, k_stride_head, g_stride_token, g_stride_head, beta_stride_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, GATE: tl.constexpr, NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Invert one chunk's system, the identity plus beta_l k_l k_s decayed from s < l to l, by
    forward substitution; with gates of channels what is beside the identity lies at the inverse's
    place.
    """
    head, first = tl.program_id(1), tl.program_id(0) * CHUNK
    start, tokens, _, _ = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    if first >= tokens:
        return
    row, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token, inside = start + first + row, first + row < tokens
    inverse_ptr += (token * HEADS + head)[:, None] * CHUNK + row[None, :]
    if GATE == "channel":
        system = tl.load(inverse_ptr, mask=inside[:, None], other=0.0)
    else:
        mask = inside[:, None] & (key < KEY)[None, :]
        k = load_tile(k_ptr + head // GROUP * k_stride_head, token * k_stride_token, key, mask)
        if NORMALISE:
            k = unit(k, 1)
        beta = load_chunk(beta_ptr + head, token, beta_stride_token, inside)
        total = tl.zeros([CHUNK], tl.float32)
        if GATE == "head":
            g_ptr += head * g_stride_head
            total = tl.cumsum(load_chunk(g_ptr, token, g_stride_token, inside), 0)
        products = tl.dot(k * beta[:, None], tl.trans(k), input_precision=PRECISION)
        system = products * pairwise_decay(total, True, CHUNK)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for index in range(1, tl.minimum(CHUNK, tokens - first)):
        factors = tl.sum(tl.where(row[:, None] == index, system, 0.0), 0)
        solved = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(row[:, None] == index, inverse - solved[None, :], inverse)
    tl.store(inverse_ptr, inverse, mask=inside[:, None])


@triton.jit
def delta_chunk_kernel(
    out_ptr, inverse_ptr, weights_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,
    cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr,
    scale, q_stride_token, q_stride_head, k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    g_stride_token, g_stride_head, beta_stride_token, cache_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, GATE: tl.constexpr,
    NORMALISE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Take the new tokens of one sequence, chunk by chunk, into BLOCK_V value channels of one
    head's state.
    """
    head = tl.program_id(1)
    start, tokens, continues, slot = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    row, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    kept = (key < KEY)[:, None] & (value < VALUE)[None, :]
    cache_ptr += slot * cache_stride + head * (KEY * VALUE) + key[:, None] * VALUE + value[None, :]
    state = tl.load(cache_ptr, mask=kept & continues, other=0.0)
    for first in range(0, tokens, CHUNK):
        token, inside = start + first + row, first + row < tokens
        keys, values = (
            inside[:, None] & (key < KEY)[None, :],
            inside[:, None] & (value < VALUE)[None, :],
        )
        q = load_tile(q_ptr + head // GROUP * q_stride_head, token * q_stride_token, key, keys)
        k = load_tile(k_ptr + head // GROUP * k_stride_head, token * k_stride_token, key, keys)
        v = load_tile(v_ptr + head * v_stride_head, token * v_stride_token, value, values)
        beta = load_chunk(beta_ptr + head, token, beta_stride_token, inside)
        inverse = load_tile(inverse_ptr, (token * HEADS + head) * CHUNK, row, inside[:, None])
        if NORMALISE:
            q, k = unit(q, 1), unit(k, 1)
        q *= scale
        if GATE == "channel":
            weights = load_tile(weights_ptr, (token * HEADS + head) * CHUNK, row, inside[:, None])
            g = load_tile(g_ptr + head * g_stride_head, token * g_stride_token, key, keys)
            total, last = tl.cumsum(g, 0), tl.sum(g, 0)
            reached, left, lasts = (
                tl.exp(total),
                tl.exp(last[None, :] - total),
                tl.exp(last)[:, None],
            )
        else:
            weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            total, last = tl.zeros([CHUNK], tl.float32), 0.0
            if GATE == "head":
                g = load_chunk(g_ptr + head * g_stride_head, token, g_stride_token, inside)
                total, last = tl.cumsum(g, 0), tl.sum(g, 0)
            weights *= pairwise_decay(total, False, CHUNK)
            reached, left, lasts = (
                tl.exp(total)[:, None],
                tl.exp(last - total)[:, None],
                tl.exp(last),
            )
        wanted = v * beta[:, None] - tl.dot(
            k * (beta[:, None] * reached), state, input_precision=PRECISION
        )
        corrections = tl.dot(inverse, wanted, input_precision=PRECISION)
        out = tl.dot(q * reached, state, input_precision=PRECISION)
        out = tl.dot(weights, corrections, out, input_precision=PRECISION)
        place = out_ptr + (token * HEADS + head)[:, None] * VALUE + value[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=values)
        state = tl.dot(tl.trans(k * left), corrections, state * lasts, input_precision=PRECISION)
    tl.store(cache_ptr, state, mask=kept)

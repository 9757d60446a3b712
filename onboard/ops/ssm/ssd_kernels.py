# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels of Mamba 2 for long queries, all chunks at once (arXiv:2405.21060, section 6); STEADY as in
`onboard.ops.ssm.ssm_kernels`.

What each chunk adds to the state is found for all chunks in parallel; a pass over the chunks turns
that into the state in front of each; then all outputs are found in parallel. Sequences of at most
STEPS tokens are left to the kernel that goes from token to token. A sequence's chunks
have numbers from `cu_seqlens[sequence] // CHUNK + sequence` on, which no other sequence's reach.
Operands of products have the inputs' type, sums and states are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.recurrences.triton_state import pairwise_decay, span
from onboard.ops.ssm.ssm_kernels import head_rates, time_steps


@triton.jit
def _chunk(cu_seqlens_ptr, kv_lens_ptr, slots_ptr, chunks, CHUNK: tl.constexpr):
    """Return the sequence's first row, the chunk's first token in it, the number of tokens, and the
    chunk's number.
    """
    sequence, index = tl.program_id(2) // chunks, tl.program_id(2) % chunks
    start, tokens, _, _ = span(sequence, cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    return start, index * CHUNK, tokens, start // CHUNK + sequence + index


@triton.jit
def _decays(dt_ptr, A, bias, token, inside, head, stride, least, most, STEADY: tl.constexpr):
    """Return the chunk's time steps, zero outside, and the logarithms of its decays, cumulative and
    in all.
    """
    dt = time_steps(dt_ptr + token * stride + head, inside, bias, least, most, STEADY)
    return dt, tl.cumsum(dt * A, 0), tl.sum(dt * A, 0)


@triton.jit(do_not_specialize=["chunks"])
def ssd_state_kernel(
    states_ptr, decays_ptr, x_ptr, A_ptr, B_ptr, D_ptr, dt_ptr, bias_ptr,
    cu_seqlens_ptr, kv_lens_ptr, slots_ptr, chunks,
    least, most, x_stride_token, x_stride_head, B_stride_token, B_stride_group, dt_stride_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    DOT_TYPE: tl.constexpr, STEPS: tl.constexpr, STEADY: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Find what one chunk adds to BLOCK_P channels of one head's state, and how much of the older
    state it leaves.
    """
    head = tl.program_id(1)
    start, first, tokens, number = _chunk(cu_seqlens_ptr, kv_lens_ptr, slots_ptr, chunks, CHUNK)
    if (first >= tokens) | (tokens <= STEPS):
        return
    row, n = first + tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    channel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    token, inside = start + row, row < tokens
    A, _, bias = head_rates(A_ptr, D_ptr, bias_ptr, head, head < HEADS, STEADY)
    dt, total, last = _decays(
        dt_ptr, A, bias, token, inside, head, dt_stride_token, least, most, STEADY
    )
    x_ptr += token[:, None] * x_stride_token + head * x_stride_head + channel[None, :]
    x = tl.load(x_ptr, mask=inside[:, None] & (channel < SIZE)[None, :], other=0.0).to(tl.float32)
    B_ptr += token[:, None] * B_stride_token + head // GROUP * B_stride_group + n[None, :]
    B = tl.load(B_ptr, mask=inside[:, None] & (n < STATE)[None, :], other=0.0)
    left = x * (dt * tl.exp(last - total))[:, None]
    added = tl.dot(tl.trans(left.to(DOT_TYPE)), B.to(DOT_TYPE), input_precision=PRECISION)
    states_ptr += (number * HEADS + head) * (SIZE * STATE)
    kept = (channel < SIZE)[:, None] & (n < STATE)[None, :]
    tl.store(states_ptr + channel[:, None] * STATE + n[None, :], added, mask=kept)
    if tl.program_id(0) == 0:
        tl.store(decays_ptr + number * HEADS + head, last)


@triton.jit
def ssd_pass_kernel(
    states_ptr, decays_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr, cache_stride,
    HEADS: tl.constexpr, ELEMENTS: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace what each chunk adds to BLOCK numbers of one head's state by the state in front of
    the chunk.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    start, tokens, continues, slot = span(sequence, cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    if tokens <= STEPS:
        return
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < ELEMENTS
    cache_ptr += slot * cache_stride + head * ELEMENTS + place
    state = tl.load(cache_ptr, mask=inside & continues, other=0.0).to(tl.float32)
    number = start // CHUNK + sequence
    states_ptr += (number * HEADS + head) * ELEMENTS + place
    decays_ptr += number * HEADS + head
    for _ in tl.range(0, tokens, CHUNK, num_stages=4):
        added = tl.load(states_ptr, mask=inside, other=0.0)
        decay = tl.exp(tl.load(decays_ptr))
        tl.store(states_ptr, state, mask=inside)
        state = state * decay + added
        states_ptr += HEADS * ELEMENTS
        decays_ptr += HEADS
    tl.store(cache_ptr, state, mask=inside)


@triton.jit(do_not_specialize=["chunks"])
def ssd_output_kernel(
    out_ptr, states_ptr, x_ptr, A_ptr, B_ptr, C_ptr, D_ptr, dt_ptr, bias_ptr,
    cu_seqlens_ptr, kv_lens_ptr, slots_ptr, chunks,
    least, most, x_stride_token, x_stride_head, B_stride_token, B_stride_group, C_stride_token, C_stride_group,
    dt_stride_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    DOT_TYPE: tl.constexpr, STEPS: tl.constexpr, STEADY: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Find BLOCK_P channels of one head's outputs of one chunk from its inputs and the state in
    front of it.
    """
    head = tl.program_id(1)
    start, first, tokens, number = _chunk(cu_seqlens_ptr, kv_lens_ptr, slots_ptr, chunks, CHUNK)
    if (first >= tokens) | (tokens <= STEPS):
        return
    row, n = first + tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    channel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    token, inside = start + row, row < tokens
    states, channels = (
        inside[:, None] & (n < STATE)[None, :],
        inside[:, None] & (channel < SIZE)[None, :],
    )
    A, D, bias = head_rates(A_ptr, D_ptr, bias_ptr, head, head < HEADS, STEADY)
    dt, total, _ = _decays(
        dt_ptr, A, bias, token, inside, head, dt_stride_token, least, most, STEADY
    )
    B_ptr += token[:, None] * B_stride_token + head // GROUP * B_stride_group + n[None, :]
    C_ptr += token[:, None] * C_stride_token + head // GROUP * C_stride_group + n[None, :]
    B, C = (
        tl.load(B_ptr, mask=states, other=0.0).to(DOT_TYPE),
        tl.load(C_ptr, mask=states, other=0.0).to(DOT_TYPE),
    )
    weights = tl.dot(C, tl.trans(B), input_precision=PRECISION) * pairwise_decay(
        total, False, CHUNK
    )
    x_ptr += token[:, None] * x_stride_token + head * x_stride_head + channel[None, :]
    x = tl.load(x_ptr, mask=channels, other=0.0).to(tl.float32)
    inputs, out = (x * dt[:, None]).to(DOT_TYPE), D * x
    out = tl.dot(weights.to(DOT_TYPE), inputs, out, input_precision=PRECISION)
    states_ptr += (number * HEADS + head) * (SIZE * STATE) + channel[:, None] * STATE + n[None, :]
    state = tl.load(states_ptr, mask=(channel < SIZE)[:, None] & (n < STATE)[None, :], other=0.0)
    older = tl.dot(C, tl.trans(state.to(DOT_TYPE)), input_precision=PRECISION)
    out += older * tl.exp(total)[:, None]
    tl.store(
        out_ptr + (token * HEADS + head)[:, None] * SIZE + channel[None, :], out, mask=channels
    )

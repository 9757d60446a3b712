# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels of state space models: Mamba 2 (arXiv:2405.21060, section 6) and Mamba (arXiv:2312.00752,
section 3).

A program keeps some channels of a state in registers: no two channels meet. Decode goes from token
to token; so does Mamba, whose decays differ from channel to channel; Mamba 2 otherwise comes in
chunks, as matrix products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.recurrences.triton_state import pairwise_decay, softplus, span
from onboard.ops.triton.overlap import wait_for_inputs


@triton.jit
def head_rates(A_ptr, D_ptr, bias_ptr, head, here, STEADY: tl.constexpr):
    """Return a head's rate of decay, what it lets pass by its state, and the bias of its time steps;
    of STEADY ones the pointer has the first without its sign, and the others are zero.
    """
    A = tl.load(A_ptr + head, mask=here, other=0.0).to(tl.float32)
    if STEADY:
        return -A, 0.0, 0.0
    else:
        D = tl.load(D_ptr + head, mask=here, other=0.0).to(tl.float32)
        return A, D, tl.load(bias_ptr + head, mask=here, other=0.0).to(tl.float32)


@triton.jit
def time_steps(dt_ptr, inside, bias, least, most, STEADY: tl.constexpr):
    """Return how long tokens take, by what the model projects, or STEADY ones: one; those outside
    take no time.
    """
    if STEADY:
        return inside.to(tl.float32)
    else:
        dt = softplus(tl.load(dt_ptr, mask=inside, other=0.0).to(tl.float32) + bias)
        return tl.where(inside, tl.minimum(tl.maximum(dt, least), most), 0.0)


@triton.jit
def ssm_step_kernel(
    out_ptr, x_ptr, A_ptr, B_ptr, C_ptr, D_ptr, dt_ptr, bias_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr,
    least, most, x_stride_token, x_stride_head, B_stride_token, B_stride_group, C_stride_token, C_stride_group,
    dt_stride_token, cache_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, STEPS: tl.constexpr,
    STEADY: tl.constexpr, EACH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take the new tokens of one sequence, if they are at most STEPS, one by one, into BLOCK_P
    channels of the states of EACH heads in turn; the next one's state is asked for before.
    """
    first = tl.program_id(1) * EACH
    start, tokens, continues, slot = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    if tokens > STEPS:
        return
    channel, n = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    inside = (channel < SIZE)[:, None] & (n < STATE)[None, :]
    cache_ptr += (
        slot * cache_stride + first * (SIZE * STATE) + channel[:, None] * STATE + n[None, :]
    )
    later = tl.load(cache_ptr, mask=inside & continues, other=0.0)
    wait_for_inputs(OVERLAP, START_NEXT=False)  # the state is that of an earlier step
    x_ptr += start * x_stride_token + channel
    B_ptr += start * B_stride_token + n
    C_ptr += start * C_stride_token + n
    dt_ptr += start * dt_stride_token
    out_ptr += start * (HEADS * SIZE) + channel
    for i in range(EACH):
        head = first + i
        state = later.to(tl.float32)
        more = continues & (i + 1 < EACH) & (head + 1 < HEADS)
        later = tl.load(cache_ptr + SIZE * STATE, mask=inside & more, other=0.0)
        here = head < HEADS
        A, D, bias = head_rates(A_ptr, D_ptr, bias_ptr, head, here, STEADY)
        real, states, group = (channel < SIZE) & here, (n < STATE) & here, head // GROUP
        for token in range(tokens):
            place = token * x_stride_token + head * x_stride_head
            x = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
            place = token * B_stride_token + group * B_stride_group
            B = tl.load(B_ptr + place, mask=states, other=0.0).to(tl.float32)
            place = token * C_stride_token + group * C_stride_group
            C = tl.load(C_ptr + place, mask=states, other=0.0).to(tl.float32)
            place = token * dt_stride_token + head
            dt = time_steps(dt_ptr + place, here, bias, least, most, STEADY)
            state = state * tl.exp(dt * A) + (dt * x)[:, None] * B[None, :]
            out = tl.sum(state * C[None, :], 1) + D * x
            tl.store(out_ptr + (token * HEADS + head) * SIZE, out, mask=real)
        tl.store(cache_ptr, state, mask=inside & here)
        cache_ptr += SIZE * STATE


@triton.jit
def ssm_chunk_kernel(
    out_ptr, x_ptr, A_ptr, B_ptr, C_ptr, D_ptr, dt_ptr, bias_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr,
    least, most, x_stride_token, x_stride_head, B_stride_token, B_stride_group, C_stride_token, C_stride_group,
    dt_stride_token, cache_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    DOT_TYPE: tl.constexpr, STEPS: tl.constexpr, STEADY: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the new tokens of one sequence, if they are more than STEPS, chunk by chunk, into BLOCK_P
    channels of one head's state, which stays in registers; operands of products have DOT_TYPE.
    """
    head = tl.program_id(1)
    start, tokens, continues, slot = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    if tokens <= STEPS:
        return
    row, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    channel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    kept = (n < STATE)[:, None] & (channel < SIZE)[None, :]
    cache_ptr += slot * cache_stride + head * (SIZE * STATE) + channel[None, :] * STATE + n[:, None]
    state = tl.load(cache_ptr, mask=kept & continues, other=0.0).to(tl.float32)
    A, D, bias = head_rates(A_ptr, D_ptr, bias_ptr, head, head < HEADS, STEADY)
    x_ptr += head * x_stride_head + channel[None, :]
    B_ptr += head // GROUP * B_stride_group + n[None, :]
    C_ptr += head // GROUP * C_stride_group + n[None, :]
    for first in range(0, tokens, CHUNK):
        token, inside = start + first + row, first + row < tokens
        states, channels = (
            inside[:, None] & (n < STATE)[None, :],
            inside[:, None] & (channel < SIZE)[None, :],
        )
        x = tl.load(x_ptr + token[:, None] * x_stride_token, mask=channels, other=0.0)
        B = tl.load(B_ptr + token[:, None] * B_stride_token, mask=states, other=0.0).to(DOT_TYPE)
        C = tl.load(C_ptr + token[:, None] * C_stride_token, mask=states, other=0.0).to(DOT_TYPE)
        place = token * dt_stride_token + head
        dt = time_steps(dt_ptr + place, inside, bias, least, most, STEADY)
        total, last = tl.cumsum(dt * A, 0), tl.sum(dt * A, 0)
        weights = tl.dot(C, tl.trans(B), input_precision=PRECISION)
        weights *= pairwise_decay(total, False, CHUNK) * dt[None, :]
        older = tl.dot(C, state.to(DOT_TYPE), input_precision=PRECISION)
        wide = x.to(tl.float32)
        out = older * tl.exp(total)[:, None] + D * wide
        out = tl.dot(weights.to(DOT_TYPE), x.to(DOT_TYPE), out, input_precision=PRECISION)
        tl.store(
            out_ptr + (token * HEADS + head)[:, None] * SIZE + channel[None, :], out, mask=channels
        )
        left = wide * (dt * tl.exp(last - total))[:, None]
        added = tl.dot(tl.trans(B), left.to(DOT_TYPE), input_precision=PRECISION)
        state = state * tl.exp(last) + added
    tl.store(cache_ptr, state, mask=kept)


@triton.jit
def selective_scan_kernel(
    out_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr,
    cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr,
    x_stride, dt_stride, B_stride, C_stride, z_stride, cache_stride,
    CHANNELS: tl.constexpr, STATE: tl.constexpr, HAS_D: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the new tokens of one sequence, one by one, into the states of BLOCK_C channels."""
    start, tokens, continues, slot = span(tl.program_id(1), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    channel, n = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    real, inside = channel < CHANNELS, (channel < CHANNELS)[:, None] & (n < STATE)[None, :]
    place = channel[:, None] * STATE + n[None, :]
    cache_ptr += slot * cache_stride + place
    state = tl.load(cache_ptr, mask=inside & continues, other=0.0)
    A = tl.load(A_ptr + place, mask=inside, other=0.0).to(tl.float32)
    D, bias = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.float32)
    if HAS_D:
        D = tl.load(D_ptr + channel, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=real, other=0.0).to(tl.float32)
    x_ptr += start * x_stride + channel
    dt_ptr += start * dt_stride + channel
    out_ptr += start * CHANNELS + channel
    for token in range(tokens):
        x = tl.load(x_ptr + token * x_stride, mask=real, other=0.0).to(tl.float32)
        dt = softplus(
            tl.load(dt_ptr + token * dt_stride, mask=real, other=0.0).to(tl.float32) + bias
        )
        B = tl.load(B_ptr + (start + token) * B_stride + n, mask=n < STATE, other=0.0).to(
            tl.float32
        )
        C = tl.load(C_ptr + (start + token) * C_stride + n, mask=n < STATE, other=0.0).to(
            tl.float32
        )
        state = state * tl.exp(dt[:, None] * A) + (dt * x)[:, None] * B[None, :]
        out = tl.sum(state * C[None, :], 1) + D * x
        if HAS_GATE:
            z = tl.load(z_ptr + (start + token) * z_stride + channel, mask=real, other=0.0).to(
                tl.float32
            )
            out *= z * tl.sigmoid(z)
        tl.store(out_ptr + token * CHANNELS, out.to(out_ptr.dtype.element_ty), mask=real)
    tl.store(cache_ptr, state, mask=inside)

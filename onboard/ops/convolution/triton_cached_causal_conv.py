# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""The short depthwise convolution with a cache of each sequence's last inputs: one kernel for all
steps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onboard.config import suggest
from onboard.errors import UsageError
from onboard.ops.convolution.causal_conv import fake_conv
from onboard.ops.library import register_op
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.linear.triton_silu_mul import activate
from onboard.ops.recurrences.triton_state import span
from onboard.ops.result_places import output_rows
from onboard.ops.triton.launch import last_contiguous, overlaps, power_of_two, require_device
from onboard.ops.triton.overlap import wait_for_inputs

STEP_CHANNELS, CHANNELS, TOKENS = 256, 64, 32
"""Channels of a program in decode and otherwise, and tokens of a program."""


@triton.jit
def _keep_inputs(
    x_ptr, cache_ptr, tokens, continues, real, x_stride,
    CHANNELS: tl.constexpr, PAST: tl.constexpr, BLOCK_PAST: tl.constexpr,
):  # fmt: skip
    """Store the last PAST inputs of a sequence, some of which may be in the state already."""
    row = tl.arange(0, BLOCK_PAST)[:, None]
    position = tokens - PAST + row
    kept = real & (row < PAST)
    new = tl.load(x_ptr + position * x_stride, mask=kept & (position >= 0), other=0.0)
    old = tl.load(
        cache_ptr + (tokens + row) * CHANNELS, mask=kept & (position < 0) & continues, other=0.0
    )
    tl.debug_barrier()  # every thread has read the old state
    tl.store(cache_ptr + row * CHANNELS, tl.where(position < 0, old, new.to(old.dtype)), mask=kept)


@triton.jit
def _conv_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, cache_ptr, x_stride, cache_stride,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, DILATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_PAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve BLOCK_T tokens and BLOCK_C channels of one sequence; its first program alone reads
    and writes the state.

    BLOCK_T is at least the number of past inputs, unless all queries are one token.
    """
    PAST: tl.constexpr = DILATION * (KERNEL - 1)
    start, tokens, continues, slot = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    wait_for_inputs(OVERLAP)
    if tl.program_id(0) * BLOCK_T >= tokens:
        return
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = (channel < CHANNELS)[None, :]
    x_ptr += start * x_stride + channel[None, :]
    cache_ptr += slot * cache_stride + channel[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(KERNEL):
        position = (token - (KERNEL - 1 - tap) * DILATION)[:, None]
        new = tl.load(
            x_ptr + position * x_stride,
            mask=real & (position >= 0) & (position < tokens),
            other=0.0,
        )
        old = tl.load(
            cache_ptr + (PAST + position) * CHANNELS,
            mask=real & (position < 0) & continues,
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + channel * KERNEL + tap, mask=channel < CHANNELS, other=0.0
        ).to(tl.float32)
        total += (new.to(tl.float32) + old.to(tl.float32)) * weight[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[
            None, :
        ]
    if ACTIVATION is not None:
        total = activate(total, ACTIVATION)
    out_ptr += (start + token)[:, None] * CHANNELS + channel[None, :]
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=real & (token < tokens)[:, None])
    if PAST > 0:  # noqa: SIM102  (known when the kernel is compiled, the other not)
        if tl.program_id(0) == 0:
            _keep_inputs(
                x_ptr, cache_ptr, tokens, continues, real, x_stride, CHANNELS, PAST, BLOCK_PAST
            )


@register_op(fake_conv, mutates=("conv_cache",))
def triton_cached_causal_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    conv_cache: Tensor,
    dilation: int = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """`torch_cached_causal_conv1d` of a depthwise convolution (groups: the channels) as one kernel,
    in float32.

    Raises:
        UsageError: the kernel does not know the activation, or the convolution mixes channels.
    """
    require_device(input)
    channels, _, kernel = weight.shape
    if groups != channels or input.shape[-1] != channels:
        raise UsageError(
            f"triton_cached_causal_conv1d got {groups} groups of {channels} channels",
            hint="Use torch",
        )
    if activation is not None and activation not in KERNEL_ACTIVATIONS:
        hint = suggest(activation, KERNEL_ACTIVATIONS)
        raise UsageError(f"triton_cached_causal_conv1d has no activation {activation!r}", hint=hint)
    x, past = last_contiguous(input)[0], dilation * (kernel - 1)
    sequences, _, longest_query, *_ = batch_info_host.tolist()
    decode = longest_query == 1
    block = min(STEP_CHANNELS if decode else CHANNELS, power_of_two(channels))
    tokens = 1 if decode else max(TOKENS, power_of_two(max(1, past)))
    out = output_rows(tuple(x.shape), input.dtype, batch_info_host, input.device)
    _conv_kernel[(triton.cdiv(longest_query, tokens), triton.cdiv(channels, block), sequences)](
        out, x, weight.contiguous(), bias, cu_seqlens, kv_lens, state_slots, conv_cache,
        x.stride(0), conv_cache.stride(0), CHANNELS=channels, KERNEL=kernel, DILATION=dilation,
        HAS_BIAS=bias is not None, ACTIVATION=None if activation is None else KERNEL_ACTIVATIONS[activation],
        BLOCK_T=tokens, BLOCK_C=block, BLOCK_PAST=power_of_two(max(1, past)), num_warps=1 if decode else 4,
        **overlaps(x.device),
    )  # fmt: skip
    return out[None]

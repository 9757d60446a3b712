# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""Both gates of a gated delta rule in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.triton.launch import last_contiguous, overlaps, power_of_two, require_device
from onboard.ops.triton.overlap import wait_for_inputs
from onboard.ops.triton.scalar_math import sigmoid, softplus

ELEMENTS = 512
"""Tokens of few heads share a program until it has this many elements."""


@triton.jit(do_not_specialize=["rows"])
def _gdn_gating_kernel(
    g_ptr, beta_ptr, a_ptr, b_ptr, rate_ptr, bias_ptr, rows, a_stride, b_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the gates of SIZE heads for ROWS tokens."""
    wait_for_inputs(OVERLAP)
    column = tl.arange(0, BLOCK)
    heads = column < SIZE
    rate = tl.load(rate_ptr + column, mask=heads, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(bias_ptr + column, mask=heads, other=0.0).to(tl.float32)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    inside = (row < rows) & heads[None, :]
    a = tl.load(a_ptr + row * a_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    place = row * SIZE + column[None, :]
    tl.store(g_ptr + place, rate * softplus(a + bias), mask=inside)
    tl.store(beta_ptr + place, sigmoid(b).to(beta_ptr.dtype.element_ty), mask=inside)


def _fake_gdn_gating(a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)


@register_op(_fake_gdn_gating)
def triton_fused_gdn_gating(
    a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """`torch_fused_gdn_gating` as one kernel."""
    require_device(a)
    g, beta = _fake_gdn_gating(a, b, rate, dt_bias)
    size = a.shape[-1]
    a, b = (last_contiguous(each).reshape(-1, size) for each in (a, b))
    block = power_of_two(size)
    each = max(1, ELEMENTS // block)
    if len(a):
        _gdn_gating_kernel[(triton.cdiv(len(a), each),)](
            g, beta, a, b, rate.contiguous(), dt_bias.contiguous(), len(a), a.stride(0), b.stride(0),
            SIZE=size, BLOCK=block, ROWS=each, num_warps=max(1, block * each // 256), **overlaps(a.device),
        )  # fmt: skip
    return g, beta

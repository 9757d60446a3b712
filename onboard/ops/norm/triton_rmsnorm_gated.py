# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""RMSNorm of groups of channels with a gate: one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.triton.launch import last_contiguous, overlaps, power_of_two, require_device
from onboard.ops.triton.overlap import wait_for_inputs

ELEMENTS = 512
"""Small groups share a program until it has this many elements."""


@triton.jit(do_not_specialize=["groups"])
def _rmsnorm_gated_kernel(
    out_ptr, x_ptr, weight_ptr, gate_ptr, groups, x_stride, gate_stride, eps,
    SIZE: tl.constexpr, GROUP: tl.constexpr, HAS_GATE: tl.constexpr, NORM_FIRST: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise GROUPS groups of GROUP channels; a row has SIZE // GROUP of them."""
    wait_for_inputs(OVERLAP)
    EACH: tl.constexpr = SIZE // GROUP
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (group < groups)[:, None] & (column < GROUP)
    row, channel = (group // EACH)[:, None], (group % EACH * GROUP)[:, None] + column
    value = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_GATE:
        gate = tl.load(gate_ptr + row * gate_stride + channel, mask=inside, other=0.0).to(
            tl.float32
        )
        gate = gate * tl.sigmoid(gate)
        if not NORM_FIRST:
            value *= gate
    value *= tl.rsqrt(tl.sum(value * value, 1) / GROUP + eps)[:, None]
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    value = value.to(x_ptr.dtype.element_ty).to(tl.float32) * weight
    if HAS_GATE and NORM_FIRST:
        value *= gate
    tl.store(out_ptr + row * SIZE + channel, value.to(out_ptr.dtype.element_ty), mask=inside)


@register_op(
    lambda x, weight, gate, eps, group_size, norm_before_gate, dtype: x.new_empty(
        x.shape, dtype=dtype
    ),
)
def triton_fused_rmsnorm_gated(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`torch_fused_rmsnorm_gated` as one kernel."""
    require_device(x)
    size, out = x.shape[-1], x.new_empty(x.shape, dtype=dtype)
    rows = last_contiguous(x).reshape(-1, size)
    gates = rows if gate is None else last_contiguous(gate).reshape(-1, size)
    groups, block = len(rows) * (size // group_size), power_of_two(group_size)
    each = max(1, ELEMENTS // block)
    if groups:
        _rmsnorm_gated_kernel[(triton.cdiv(groups, each),)](
            out, rows, weight.contiguous(), gates, groups, rows.stride(0), gates.stride(0), eps,
            SIZE=size, GROUP=group_size, HAS_GATE=gate is not None, NORM_FIRST=norm_before_gate,
            GROUPS=each, BLOCK=block, num_warps=min(16, max(1, block * each // 512)), **overlaps(x.device),
        )  # fmt: skip
    return out

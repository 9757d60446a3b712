# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""RMSNorm, alone and after a residual addition: one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.triton.launch import TYPES, last_contiguous, overlaps, power_of_two, require_device
from onboard.ops.triton.overlap import wait_for_inputs

ELEMENTS = 1024
"""Short rows share a program until it has this many elements."""


@triton.jit(do_not_specialize=["rows", "inner"])
def _rmsnorm_kernel(
    out_ptr, total_ptr, x_ptr, residual_ptr, weight_ptr, rows, inner, stride_outer, stride_inner, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WIDE: tl.constexpr,
    DTYPE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows of x in DTYPE; row r lies at (r // inner) * stride_outer + (r % inner) *
    stride_inner.
    """
    wait_for_inputs(OVERLAP)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    start = (row // inner) * stride_outer + (row % inner) * stride_inner
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0)
    packed = row[:, None] * SIZE + column[None, :]
    if HAS_RESIDUAL:
        total = x.to(tl.float32) + tl.load(residual_ptr + packed, mask=inside, other=0.0).to(
            tl.float32
        )
        # The sum is rounded before it is normalised, as in separate steps
        x = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + packed, x, mask=inside)
    values = x.to(DTYPE).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    normed = values * scale[:, None]
    if not WIDE:
        normed = normed.to(DTYPE).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + packed, (normed * weight[None, :]).to(out_ptr.dtype.element_ty), mask=inside)


def as_rows(x: Tensor) -> Tensor:
    """View x as [outer, inner, size]; heads that are cut out of a wider projection need no copy."""
    x = last_contiguous(x)
    if x.dim() > 2:
        return x.flatten(0, -3)
    return x.reshape(1, -1, x.shape[-1])


def launch(
    out: Tensor,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    wide: bool,
) -> None:
    """Normalise x, or the sum of x and the residual, which is then written to `total`, in a dtype.

    `wide`: see `wide_norm`.
    """
    require_device(x)
    size = x.shape[-1]
    rows = x.numel() // size
    if rows == 0:
        return
    block = power_of_two(size)
    rows_each = max(1, ELEMENTS // block)
    x = as_rows(x)
    _rmsnorm_kernel[(triton.cdiv(rows, rows_each),)](
        out, total, x, residual, weight.contiguous(), rows, x.shape[1], x.stride(0), x.stride(1), eps,
        SIZE=size, BLOCK=block, ROWS=rows_each, HAS_RESIDUAL=residual is not None, WIDE=wide,
        DTYPE=TYPES[dtype], num_warps=min(16, max(1, block * rows_each // 512)), **overlaps(x.device),
    )  # fmt: skip


def _fake_rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    return input.new_empty(input.shape, dtype=torch.promote_types(input.dtype, weight.dtype))


def total_like(x: Tensor, residual: Tensor) -> Tensor:
    """Return an empty sum of two tensors of one shape."""
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def fake_fused_add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return empty results of the op: the norm and the sum."""
    total = total_like(x, residual)
    return total.new_empty(
        x.shape, dtype=torch.promote_types(dtype or total.dtype, weight.dtype)
    ), total


@register_op(_fake_rmsnorm, row_wise=True)
def triton_rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch_rmsnorm` as one kernel."""
    out = _fake_rmsnorm(input, weight, eps)
    launch(out, None, input, None, weight, eps, dtype=input.dtype, wide=False)
    return out


@register_op(fake_fused_add_rmsnorm, adds_residual=True, row_wise=True)
def triton_fused_add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`torch_fused_add_rmsnorm` as one kernel."""
    out, total = fake_fused_add_rmsnorm(x, residual, weight, eps, dtype)
    launch(
        out, total, x, residual.contiguous(), weight, eps, dtype=dtype or total.dtype, wide=False
    )
    return out, total

"""RMSNorm in float32 throughout, alone and after a residual addition: the kernel of `rmsnorm`, less
one rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.norm.triton_rmsnorm import launch, total_like


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_fused_add_wide_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return empty results of the op: the norm and the sum."""
    total = total_like(x, residual)
    return total.new_empty(x.shape, dtype=dtype or total.dtype), total


@register_op(lambda input, weight, eps: _like(input), row_wise=True)
def triton_wide_rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch_wide_rmsnorm` as one kernel."""
    out = _like(input)
    launch(out, None, input, None, weight, eps, dtype=input.dtype, wide=True)
    return out


@register_op(fake_fused_add_wide_rmsnorm, adds_residual=True, row_wise=True)
def triton_fused_add_wide_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`torch_fused_add_wide_rmsnorm` as one kernel."""
    out, total = fake_fused_add_wide_rmsnorm(x, residual, weight, eps, dtype)
    launch(out, total, x, residual.contiguous(), weight, eps, dtype=out.dtype, wide=True)
    return out, total

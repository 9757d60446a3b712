"""References of RMSNorm in float32 throughout, which transforms put in: nothing is rounded before
the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.norm.norm import torch_rmsnorm


@register_op(inserted=True)
def torch_wide_rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch_rmsnorm` of the input in float32, cast back behind the weight.

    Args:
        input: [..., size].
        weight: [size].
        eps: added to the mean square.

    Returns:
        [..., size] in the input's dtype.
    """
    return torch_rmsnorm(input.float(), weight.float(), eps).to(input.dtype, copy=True)


@register_op(inserted=True, adds_residual=True)
def torch_fused_add_wide_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Residual addition and `torch_wide_rmsnorm`; arguments and results as in
    `torch_fused_add_rmsnorm`.
    """
    total = x + residual
    return torch_wide_rmsnorm(total if dtype is None else total.to(dtype), weight, eps), total

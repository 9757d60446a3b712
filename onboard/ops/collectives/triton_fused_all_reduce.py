"""A sum over the ranks, the residual addition and the RMSNorm behind it: the library's collective,
then one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.collectives.collectives import dist_all_reduce
from onboard.ops.collectives.fused_all_reduce import fake_fused_allreduce_residual_rmsnorm
from onboard.ops.library import register_op
from onboard.ops.norm.triton_rmsnorm import triton_fused_add_rmsnorm
from onboard.ops.norm.triton_wide_norm import triton_fused_add_wide_rmsnorm


@register_op(fake_fused_allreduce_residual_rmsnorm)
def triton_fused_allreduce_residual_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    wide: bool = False,
    layer_type: str = "unknown",
) -> tuple[Tensor, Tensor]:
    """`torch_fused_allreduce_residual_rmsnorm` with the kernel of the sum and the norm."""
    norm = triton_fused_add_wide_rmsnorm if wide else triton_fused_add_rmsnorm
    return norm(dist_all_reduce(x, layer_type), residual, weight, eps, dtype)

"""A sum over the ranks, the residual addition and the RMSNorm behind it: the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.collectives.collectives import dist_all_reduce
from onboard.ops.library import register_op
from onboard.ops.linear.fused import torch_fused_add_rmsnorm
from onboard.ops.norm.norm import fake_rmsnorm
from onboard.ops.norm.wide_norm import torch_fused_add_wide_rmsnorm


def fake_fused_allreduce_residual_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    wide: bool = False,
    layer_type: str = "unknown",
) -> tuple[Tensor, Tensor]:
    """Return empty results of `torch_fused_allreduce_residual_rmsnorm`."""
    total = x + residual
    cast = total if dtype is None else total.to(dtype)
    return torch.empty_like(cast) if wide else fake_rmsnorm(cast, weight, eps), total


@register_op(fake_fused_allreduce_residual_rmsnorm, inserted=True)
def torch_fused_allreduce_residual_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    wide: bool = False,
    layer_type: str = "unknown",
) -> tuple[Tensor, Tensor]:
    """Add a tensor up over all ranks, add the residual, normalise.

    Args:
        x: [..., size], this rank's summand.
        residual: [..., size], the same on every rank.
        weight, eps, dtype: as in `torch_fused_add_rmsnorm`.
        wide: the norm is `torch_wide_rmsnorm`.
        layer_type: as in `dist_all_reduce`.

    Returns:
        As `torch_fused_add_rmsnorm` of the sum over the ranks.
    """
    norm = torch_fused_add_wide_rmsnorm if wide else torch_fused_add_rmsnorm
    return norm(dist_all_reduce(x, layer_type), residual, weight, eps, dtype)

"""Reference of the gated norm with the cast behind it, which transforms put in."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.ssm.ssm import torch_rmsnorm_gated


@register_op(
    lambda x, weight, gate, eps, group_size, norm_before_gate, dtype: x.new_empty(
        x.shape, dtype=dtype
    ),
    inserted=True,
)
def torch_fused_rmsnorm_gated(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`torch_rmsnorm_gated`, its result [..., size] in `dtype`."""
    out = torch_rmsnorm_gated(x, weight, gate, eps, group_size, norm_before_gate)
    return out if out.dtype == dtype else out.to(dtype)

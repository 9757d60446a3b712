"""A sum over the ranks, the residual addition and the RMSNorm behind it: one kernel where the ranks
share memory and rows are few, else a sum and a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.collectives.collectives import dist_all_reduce
from onboard.ops.collectives.fused_all_reduce import fake_fused_allreduce_residual_rmsnorm
from onboard.ops.collectives.triton_long_sum import Norm, long_sum_and_norm
from onboard.ops.collectives.triton_peer_sum import ROWS, can_exchange, peer_sum_and_norm
from onboard.ops.library import register_op
from onboard.ops.norm.triton_rmsnorm import fake_fused_add_rmsnorm, triton_fused_add_rmsnorm
from onboard.ops.norm.triton_wide_norm import (
    fake_fused_add_wide_rmsnorm,
    triton_fused_add_wide_rmsnorm,
)
from onboard.parallel.peer_memory import PeerMemory
from onboard.parallel.ranks import peer_memory


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
    memory = peer_memory()
    if memory is not None and x.shape == residual.shape and can_exchange(x, x.nbytes):
        empty = fake_fused_add_wide_rmsnorm if wide else fake_fused_add_rmsnorm
        out, total = empty(x, residual, weight, eps, dtype)
        norm = Norm(total, weight.contiguous(), eps, dtype or total.dtype, wide)
        if _in_one_kernel(out, x.contiguous(), residual.contiguous(), memory, norm):
            return out, total
    separate = triton_fused_add_wide_rmsnorm if wide else triton_fused_add_rmsnorm
    return separate(dist_all_reduce(x, layer_type), residual, weight, eps, dtype)


def _in_one_kernel(
    out: Tensor, x: Tensor, residual: Tensor, memory: PeerMemory, norm: Norm
) -> bool:
    """Do all of it, if there is a kernel for so many rows."""
    if not can_exchange(x):
        return long_sum_and_norm(out, x, residual, memory, norm)
    rows = x.numel() // x.shape[-1]
    return rows <= ROWS and peer_sum_and_norm(
        out,
        norm.total,
        x,
        residual,
        norm.weight,
        norm.eps,
        memory,
        dtype=norm.dtype,
        wide=norm.wide,
    )

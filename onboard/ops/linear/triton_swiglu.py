"""The gated feed-forward block: the library's matrix products around the fused activation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.triton_silu_mul import triton_silu_and_mul


def _fake_fused_swiglu_mlp(
    input: Tensor, gate_up_weight: Tensor, down_weight: Tensor, *_: object, **__: object
) -> Tensor:
    return input.new_empty((*input.shape[:-1], down_weight.shape[0]))


@register_op(_fake_fused_swiglu_mlp)
def triton_fused_swiglu_mlp(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """`torch_fused_swiglu_mlp` with the activation and the product with `up` in one kernel."""
    gate_up = F.linear(input, gate_up_weight, gate_up_bias)
    return F.linear(triton_silu_and_mul(gate_up, activation), down_weight, down_bias)

"""The gated feed-forward block with NVFP4 weights: how its kernels are launched."""

from __future__ import annotations

from torch import Tensor

from onboard.ops.codes.nvfp4_codes import GROUP
from onboard.ops.codes.nvfp4_swiglu import fake_fused_nvfp4_swiglu_mlp
from onboard.ops.four_bits.triton_four_bit_linear import triton_fused_four_bit_linear
from onboard.ops.library import register_op


@register_op(fake_fused_nvfp4_swiglu_mlp)
def triton_fused_nvfp4_swiglu_mlp(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_weight_scale: Tensor,
    down_weight_scale: Tensor,
    gate_up_whole: Tensor | None = None,
    down_whole: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """`torch_fused_nvfp4_swiglu_mlp`, for the activations of `KERNEL_ACTIVATIONS`: the gate is the
    end of the first product for few tokens, and behind it for more.
    """
    form = "e2m1", GROUP
    both = gate_up_weight, gate_up_bias, gate_up_weight_scale, None, gate_up_whole, *form
    x = triton_fused_four_bit_linear(input, *both, None, None, 0.0, activation)
    down = down_weight, down_bias, down_weight_scale, None, down_whole, *form
    return triton_fused_four_bit_linear(x, *down)

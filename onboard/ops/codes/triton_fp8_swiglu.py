"""The gated feed-forward block with eight-bit weights: how its kernels are launched."""

from __future__ import annotations

from torch import Tensor

from onboard.ops.codes.fp8_swiglu import fake_fused_finegrained_fp8_swiglu_mlp
from onboard.ops.codes.triton_fp8_codes import (
    triton_fp8_codes_linear,
    triton_silu_and_mul_quant_fp8,
)
from onboard.ops.library import register_op
from onboard.ops.linear.triton_fp8_linear import triton_fused_fp8_linear
from onboard.ops.linear.triton_linear import MOST_ROWS


@register_op(fake_fused_finegrained_fp8_swiglu_mlp)
def triton_fused_finegrained_fp8_swiglu_mlp(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_weight_scale: Tensor,
    down_weight_scale: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    quantize: str = "",
) -> Tensor:
    """`torch_fused_finegrained_fp8_swiglu_mlp`, for the activations of `KERNEL_ACTIVATIONS`.

    For few tokens the gate is the end of the first product; for more it is a kernel between the
    library's products, which also quantises.
    """
    both = gate_up_weight, gate_up_bias, gate_up_weight_scale, None, quantize
    down = down_weight, down_bias, down_weight_scale
    if not quantize or input.numel() <= MOST_ROWS * input.shape[-1]:
        x = triton_fused_fp8_linear(input, *both, None, None, 0.0, activation)
        return triton_fused_fp8_linear(x, *down, None, quantize)
    gate_up = triton_fused_fp8_linear(input, *both)
    codes, scales = triton_silu_and_mul_quant_fp8(gate_up, activation, quantize)
    return triton_fp8_codes_linear(codes, scales, *down, input.dtype)

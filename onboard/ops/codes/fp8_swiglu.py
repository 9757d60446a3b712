"""The gated feed-forward block with eight-bit weights: the reference."""

from __future__ import annotations

from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.linear.fp8_linear import torch_finegrained_fp8_linear
from onboard.ops.linear.fused import torch_silu_and_mul


def fake_fused_finegrained_fp8_swiglu_mlp(
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
    """Return an empty output of `torch_fused_finegrained_fp8_swiglu_mlp`."""
    return input.new_empty((*input.shape[:-1], down_weight.shape[0]))


@register_op(fake_fused_finegrained_fp8_swiglu_mlp, inserted=True, feed_forward=True)
def torch_fused_finegrained_fp8_swiglu_mlp(
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
    """`torch_fused_swiglu_mlp` with weights as `torch_finegrained_fp8_linear` has them.

    Args:
        input: [..., hidden].
        gate_up_weight: [2 * intermediate, hidden] float8_e4m3fn, gate rows first.
        down_weight: [hidden, intermediate] float8_e4m3fn.
        gate_up_weight_scale: [ceil(2 * intermediate / 128), ceil(hidden / 128)] float32, or
            [2 * intermediate] of rows.
        down_weight_scale: [ceil(hidden / 128), ceil(intermediate / 128)] float32.
        gate_up_bias: [2 * intermediate] or None.
        down_bias: [hidden] or None.
        activation: a key of `onboard.ops.linear.activation.ACTIVATIONS`.
        quantize: how the inputs of both are quantised: "token", "group"; "" not at all.

    Returns:
        [..., hidden] in the input's dtype.
    """
    both = gate_up_weight, gate_up_bias, gate_up_weight_scale, None, quantize
    x = torch_silu_and_mul(torch_finegrained_fp8_linear(input, *both), activation)
    down = down_weight, down_bias, down_weight_scale, None, quantize
    return torch_finegrained_fp8_linear(x, *down)

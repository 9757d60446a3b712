"""The gated feed-forward block with NVFP4 weights: the reference."""

from __future__ import annotations

from torch import Tensor

from onboard.ops.four_bits.four_bit_linear import torch_nvfp4_linear
from onboard.ops.library import register_op
from onboard.ops.linear.fused import torch_silu_and_mul


def fake_fused_nvfp4_swiglu_mlp(
    input: Tensor, gate_up_weight: Tensor, down_weight: Tensor, *_: object, **__: object
) -> Tensor:
    """Return an empty output of `torch_fused_nvfp4_swiglu_mlp`."""
    return input.new_empty((*input.shape[:-1], down_weight.shape[0]))


@register_op(fake_fused_nvfp4_swiglu_mlp, inserted=True, feed_forward=True)
def torch_fused_nvfp4_swiglu_mlp(
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
    """`torch_fused_swiglu_mlp` with weights as `torch_nvfp4_linear` has them; inputs are exact.

    Args:
        input: [..., hidden].
        gate_up_weight: [2 * intermediate, 16 * ceil(hidden / 128)] int32, gate rows first.
        down_weight: [hidden, 16 * ceil(intermediate / 128)] int32.
        gate_up_weight_scale: [2 * intermediate, hidden / 16] float8_e4m3fn.
        down_weight_scale: [hidden, intermediate / 16] float8_e4m3fn.
        gate_up_whole: [2 * intermediate] float32, further scales; or None.
        down_whole: [hidden], likewise.
        gate_up_bias: [2 * intermediate] or None.
        down_bias: [hidden] or None.
        activation: a key of `onboard.ops.linear.activation.ACTIVATIONS`.

    Returns:
        [..., hidden] in the input's dtype.
    """
    both = gate_up_weight, gate_up_bias, gate_up_weight_scale, None, gate_up_whole
    x = torch_silu_and_mul(torch_nvfp4_linear(input, *both), activation)
    return torch_nvfp4_linear(x, down_weight, down_bias, down_weight_scale, None, down_whole)

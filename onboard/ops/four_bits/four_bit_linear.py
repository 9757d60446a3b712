"""Linear layers whose weights have four bits: references, which run everywhere.

`four_bits.py` has the layout of the weights; inputs are not quantised.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from onboard.ops.four_bits.four_bits import unpacked
from onboard.ops.library import register_op
from onboard.ops.linear.fused import torch_silu_and_mul
from onboard.ops.norm.norm import torch_rmsnorm


def _fake_four_bit_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    zero: Tensor | None = None,
    whole: Tensor | None = None,
    levels: str = "int4",
    group: int = 128,
) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    zero: Tensor | None,
    whole: Tensor | None,
    levels: str,
    group: int,
) -> Tensor:
    """Return the product, summed up in float32, [..., outputs] in the input's dtype."""
    values = unpacked(weight, weight_scale, zero, whole, levels, group, input.shape[-1])
    y = F.linear(input.float(), values, None if bias is None else bias.float())
    return y.to(input.dtype)


@register_op(_fake_four_bit_linear, inserted=True, takes_codes="fused_four_bit_linear")
def torch_int4_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    zero: Tensor | None = None,
    whole: Tensor | None = None,
    levels: str = "int4",
    group: int = 128,
) -> Tensor:
    """A linear layer with integers of four bits, of which a group of an output's inputs share a
    scale, and a code of zero.

    Args:
        input: [..., in].
        weight: [out, 16 * ceil(in / 128)] int32: eight codes a word, as `four_bits` lays them.
        bias: [out] or None.
        weight_scale: [out, ceil(in / group)], of any float type.
        zero: [out, ceil(in / group)] uint8; None: 8. Of float32 it is what code 0 stands for.
        whole: [out] float32, further scales; or None.
        levels: what codes stand for, as `four_bits.Levels`.
        group: 16, 32, 64, or at least 128.

    Returns:
        [..., out] in the input's dtype, summed up in float32.
    """
    return _linear(input, weight, bias, weight_scale, zero, whole, levels, group)


@register_op(_fake_four_bit_linear, inserted=True, takes_codes="fused_four_bit_linear")
def torch_mxfp4_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    zero: Tensor | None = None,
    whole: Tensor | None = None,
    levels: str = "e2m1",
    group: int = 32,
) -> Tensor:
    """`torch_int4_linear` for floats of four bits (E2M1); weight_scale is uint8: exponents of 2,
    with 127 added.
    """
    return _linear(input, weight, bias, weight_scale, zero, whole, levels, group)


@register_op(_fake_four_bit_linear, inserted=True, takes_codes="fused_four_bit_linear")
def torch_nvfp4_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    zero: Tensor | None = None,
    whole: Tensor | None = None,
    levels: str = "e2m1",
    group: int = 16,
) -> Tensor:
    """`torch_int4_linear` for floats of four bits (E2M1), with float8_e4m3fn scales and further
    ones in `whole`.
    """
    return _linear(input, weight, bias, weight_scale, zero, whole, levels, group)


def fake_fused_four_bit_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    zero: Tensor | None = None,
    whole: Tensor | None = None,
    levels: str = "int4",
    group: int = 128,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """Return an empty output of `torch_fused_four_bit_linear`."""
    outputs = weight.shape[0] // 2 if activation else weight.shape[0]
    return input.new_empty((*input.shape[:-1], outputs))


@register_op(fake_fused_four_bit_linear, inserted=True)
def torch_fused_four_bit_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    zero: Tensor | None = None,
    whole: Tensor | None = None,
    levels: str = "int4",
    group: int = 128,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """`torch_fused_linear` with a weight as `torch_int4_linear` has it."""
    x = input if norm_weight is None else torch_rmsnorm(input, norm_weight, eps)
    y = _linear(x, weight, bias, weight_scale, zero, whole, levels, group)
    y = torch_silu_and_mul(y, activation) if activation else y
    return y if residual is None else y + residual

"""Linear layers whose weights are integers of eight bits: references, which run everywhere.

Groups of an output's inputs share a scale. Inputs are exact, or integers, too, with a scale a token
or the layer's own, as compressed-tensors has them (its `calculate_qparams` and `quantize`,
symmetric); products of integers are summed up as integers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.fp8_linear import scales_of
from onboard.ops.linear.fused import torch_silu_and_mul
from onboard.ops.norm.norm import torch_rmsnorm

HALF_RANGE = 127.5
"""What a token's largest magnitude is to become: half of the range of -128 .. 127."""


def quantise_int8_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return int8 values [rows, columns] and their scales [rows] float32: those of tokens, or the
    `scale` [1] that is given.
    """
    x = x.float()
    if scale is None:
        scales = scales_of(x.abs().amax(-1), HALF_RANGE)
    else:
        scales = scale.float().reshape(1).repeat(len(x))
    return (x / scales[:, None]).round().clamp(-128, 127).to(torch.int8), scales


def int8_values(codes: Tensor, scale: Tensor, offset: Tensor | None, group: int) -> Tensor:
    """Return the float32 values [outputs, inputs] of codes: `code * scale + offset`, with the scale
    and the offset of the input's group.
    """
    inputs = codes.shape[-1]
    values = codes.float() * _spread(scale, group, inputs)
    return values if offset is None else values + _spread(offset, group, inputs)


def _spread(groups: Tensor, group: int, inputs: int) -> Tensor:
    return groups.float().repeat_interleave(group, -1)[..., :inputs]


def _fake_int8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    offset: Tensor | None = None,
    input_scale: Tensor | None = None,
    group: int = 128,
    quantize: str = "",
) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


@register_op(_fake_int8_linear, inserted=True, takes_codes="fused_int8_linear")
def torch_int8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    offset: Tensor | None = None,
    input_scale: Tensor | None = None,
    group: int = 128,
    quantize: str = "",
) -> Tensor:
    """A linear layer with integers of eight bits, of which a group of an output's inputs share a
    scale, and an offset.

    Args:
        input: [..., in].
        weight: [out, in] int8.
        bias: [out] or None.
        weight_scale: [out, ceil(in / group)], of any float type.
        offset: like weight_scale, what is added to a code times its scale; None: 0.
        input_scale: [1] float32, for quantize "tensor".
        group: 16, 32, 64, or at least 128.
        quantize: how the input is quantised: "token", "tensor"; "" not at all. Then a row has one
            scale and no offset.

    Returns:
        [..., out] in the input's dtype; products of integers are summed up exactly, others in
        float32.
    """
    x = input.reshape(-1, input.shape[-1])
    if quantize:
        y = _integer_product(x, weight, weight_scale, input_scale if quantize == "tensor" else None)
        y = y if bias is None else y + bias.float()
    else:
        values = int8_values(weight, weight_scale, offset, group)
        y = F.linear(x.float(), values, None if bias is None else bias.float())
    return y.to(input.dtype).view(*input.shape[:-1], -1)


def _integer_product(x: Tensor, weight: Tensor, scale: Tensor, given: Tensor | None) -> Tensor:
    """Return the product of inputs as integers, [rows, outputs] float32."""
    codes, scales = quantise_int8_rows(x, given)
    # float64 holds each sum of integers exactly
    sums = codes.double() @ weight.double().t()
    return sums.float() * scales[:, None] * scale.float()[:, 0]


def fake_fused_int8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    offset: Tensor | None = None,
    input_scale: Tensor | None = None,
    group: int = 128,
    quantize: str = "",
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """Return an empty output of `torch_fused_int8_linear`."""
    outputs = weight.shape[0] // 2 if activation else weight.shape[0]
    return input.new_empty((*input.shape[:-1], outputs))


@register_op(fake_fused_int8_linear, inserted=True)
def torch_fused_int8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    offset: Tensor | None = None,
    input_scale: Tensor | None = None,
    group: int = 128,
    quantize: str = "",
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """`torch_fused_linear` with a weight as `torch_int8_linear` has it."""
    x = input if norm_weight is None else torch_rmsnorm(input, norm_weight, eps)
    y = torch_int8_linear(x, weight, bias, weight_scale, offset, input_scale, group, quantize)
    y = torch_silu_and_mul(y, activation) if activation else y
    return y if residual is None else y + residual

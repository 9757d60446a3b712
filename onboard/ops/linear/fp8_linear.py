"""Linear layers whose weights are eight-bit floats: references, which run everywhere.

The scheme is that of compressed-tensors and of DeepSeek-V3 (arXiv:2412.19437, section 3.3): a
weight's scale is a row's, or a block's of 128 x 128; an input's that of a token, of a token's group
of 128, or of the whole tensor, which the checkpoint has then.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.fused import torch_silu_and_mul
from onboard.ops.norm.norm import torch_rmsnorm

BLOCK = 128
LARGEST = 448.0
"""Of float8_e4m3fn."""
SMALLEST_SCALE = 1e-12
"""Of a token of zeros."""


def scales_of(largest: Tensor, most: float) -> Tensor:
    """Return the scales with which the largest magnitudes become `most`, not below
    `SMALLEST_SCALE`.
    """
    # A tensor divides; by a number a GPU multiplies with its rounded reciprocal
    return (largest / largest.new_full((), most)).clamp_min(SMALLEST_SCALE)


def quantise_rows(x: Tensor, how: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn values [rows, columns] and their scales, float32: [rows], or [rows,
    ceil(columns / 128)] of groups.

    `how` is "token", "group" or "tensor"; the last takes the scale [1] that is given.
    """
    x = x.float()
    if how == "tensor":
        assert scale is not None, "a tensor's scale is the checkpoint's"
        scales = scale.float().reshape(1).repeat(len(x))
        return (x / scales[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales
    grouped = x.unsqueeze(1)
    if how == "group":
        grouped = F.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    scales = scales_of(grouped.abs().amax(-1), LARGEST)
    codes = (grouped / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    codes = codes.flatten(1)[:, : x.shape[1]]
    return codes, scales if how == "group" else scales[:, 0]


def dequantised(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 values of codes [rows, columns] with the scales of rows, groups or
    blocks.
    """
    rows, columns = codes.shape
    if scale.dim() == 1:
        return codes.float() * scale[:, None]
    wide = scale.repeat_interleave(BLOCK, 1)[:, :columns]
    if len(scale) != rows:
        wide = wide.repeat_interleave(BLOCK, 0)[:rows]
    return codes.float() * wide


def _fake_fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    quantize: str = "",
) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    quantize: str,
) -> Tensor:
    """Return the product, summed up in float32, [..., outputs] in the input's dtype."""
    x = input.reshape(-1, input.shape[-1])
    x = dequantised(*quantise_rows(x, quantize, input_scale)) if quantize else x.float()
    y = F.linear(x, dequantised(weight, weight_scale), None if bias is None else bias.float())
    return y.to(input.dtype).view(*input.shape[:-1], -1)


@register_op(_fake_fp8_linear, inserted=True, takes_codes="fused_fp8_linear")
def torch_fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    quantize: str = "",
) -> Tensor:
    """A linear layer whose weight has a scale for each row.

    Args:
        input: [..., in].
        weight: [out, in] float8_e4m3fn.
        bias: [out] or None.
        weight_scale: [out] float32.
        input_scale: [1] float32, for quantize "tensor".
        quantize: how the input is quantised: "token", "group", "tensor"; "" not at all.

    Returns:
        [..., out] in the input's dtype, summed up in float32.
    """
    return _linear(input, weight, bias, weight_scale, input_scale, quantize)


@register_op(_fake_fp8_linear, inserted=True, takes_codes="fused_fp8_linear")
def torch_finegrained_fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    quantize: str = "",
) -> Tensor:
    """As `torch_fp8_linear`, with scales of blocks: weight_scale [ceil(out / 128), ceil(in /
    128)].
    """
    return _linear(input, weight, bias, weight_scale, input_scale, quantize)


def fake_fused_fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    quantize: str = "",
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """Return an empty output of `torch_fused_fp8_linear`."""
    outputs = weight.shape[0] // 2 if activation else weight.shape[0]
    return input.new_empty((*input.shape[:-1], outputs))


@register_op(fake_fused_fp8_linear, inserted=True)
def torch_fused_fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    quantize: str = "",
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """`torch_fused_linear` with a weight as `torch_fp8_linear` or `torch_finegrained_fp8_linear`
    has it.
    """
    x = input if norm_weight is None else torch_rmsnorm(input, norm_weight, eps)
    y = _linear(x, weight, bias, weight_scale, input_scale, quantize).to(input.dtype)
    y = torch_silu_and_mul(y, activation) if activation else y
    return y if residual is None else y + residual

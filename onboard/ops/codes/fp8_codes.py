"""Norms and gates that write eight-bit floats with their scales, and the linear layers behind them
that read these: references, which run everywhere.

A scale is a token's, a token's group's of 128 channels, or the checkpoint's for the layer, as in
`onboard.ops.linear.fp8_linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.fp8_linear import BLOCK, dequantised, quantise_rows
from onboard.ops.linear.fused import torch_silu_and_mul
from onboard.ops.norm.norm import torch_rmsnorm


def fake_codes(like: Tensor, columns: int, quantize: str) -> tuple[Tensor, Tensor]:
    """Return empty codes [..., columns] and scales [..., groups]."""
    groups = -(-columns // BLOCK) if quantize == "group" else 1
    codes = like.new_empty((*like.shape[:-1], columns), dtype=torch.float8_e4m3fn)
    return codes, like.new_empty((*like.shape[:-1], groups), dtype=torch.float32)


def _codes(x: Tensor, quantize: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    codes, scales = quantise_rows(x.reshape(-1, x.shape[-1]), quantize, scale)
    return codes.view(x.shape), scales.reshape(*x.shape[:-1], -1)


def fake_rmsnorm_quant_fp8(
    input: Tensor, weight: Tensor, eps: float, quantize: str, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return empty results of `torch_rmsnorm_quant_fp8`."""
    return fake_codes(input, input.shape[-1], quantize)


@register_op(fake_rmsnorm_quant_fp8, inserted=True)
def torch_rmsnorm_quant_fp8(
    input: Tensor, weight: Tensor, eps: float, quantize: str, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`torch_rmsnorm`, quantised as the linear layers behind it have it.

    Args:
        input: [..., size].
        weight: [size].
        eps: added to the mean square.
        quantize: "token", "group" or "tensor".
        input_scale: [1] float32, for quantize "tensor".

    Returns:
        Codes [..., size] float8_e4m3fn and scales float32: [..., ceil(size / 128)] of groups, else
        [..., 1].
    """
    return _codes(torch_rmsnorm(input, weight, eps), quantize, input_scale)


def fake_silu_and_mul_quant_fp8(
    x: Tensor, activation: str, quantize: str, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return empty results of `torch_silu_and_mul_quant_fp8`."""
    return fake_codes(x, x.shape[-1] // 2, quantize)


@register_op(fake_silu_and_mul_quant_fp8, inserted=True)
def torch_silu_and_mul_quant_fp8(
    x: Tensor, activation: str, quantize: str, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`torch_silu_and_mul` of x [..., 2 * size], quantised; else as `torch_rmsnorm_quant_fp8`."""
    return _codes(torch_silu_and_mul(x, activation), quantize, input_scale)


def fake_fp8_codes_linear(
    input: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """Return an empty output of `torch_fp8_codes_linear`."""
    outputs = weight.shape[0] // 2 if activation else weight.shape[0]
    return input.new_empty((*input.shape[:-1], outputs), dtype=dtype)


@register_op(fake_fp8_codes_linear, inserted=True, takes_codes="fp8_codes_linear")
def torch_fp8_codes_linear(
    input: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """`torch_fused_fp8_linear` whose input is quantised already.

    Args:
        input: [..., in] float8_e4m3fn.
        input_scale: [..., 1] or, of groups, [..., ceil(in / 128)] float32; or [1] for all tokens.
        weight: [out, in] float8_e4m3fn, or [2 * out, in] with an activation, gate rows first.
        bias: [rows of weight] or None.
        weight_scale: [rows of weight] or, of blocks, [ceil(rows / 128), ceil(in / 128)] float32.
        dtype: of the result.
        residual: [..., out] or None; added last.
        activation: a key of `ACTIVATIONS`, for act(first half) * second half; "" for none.

    Returns:
        [..., out] in `dtype`, summed up in float32.
    """
    codes = input.reshape(-1, input.shape[-1])
    x = dequantised(codes, scale_rows(input_scale, len(codes)))
    y = F.linear(x, dequantised(weight, weight_scale), None if bias is None else bias.float())
    y = y.to(dtype).view(*input.shape[:-1], -1)
    y = torch_silu_and_mul(y, activation) if activation else y
    return y if residual is None else y + residual


def scale_rows(scale: Tensor, rows: int) -> Tensor:
    """Return the scales of rows of codes, [rows], or [rows, groups]."""
    if scale.shape[-1] == 1:
        return scale.reshape(-1).expand(rows)
    return scale.reshape(rows, -1)

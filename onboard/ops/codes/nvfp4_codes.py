"""Norms and activations that write four-bit floats (NVFP4), and the linear layer behind them that
reads these: references alone, as no GPU before compute capability 10.0 multiplies such numbers.

A group of 16 channels of a token has a float8_e4m3fn scale, which the layer's own scale multiplies;
codes are the nearest ones, ties to even.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.four_bits.four_bits import E2M1, unpacked
from onboard.ops.library import register_op
from onboard.ops.norm.norm import torch_rmsnorm

GROUP = 16
LARGEST, LARGEST_SCALE = 6.0, 448.0
_DOWN, _UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""Numbers in the middle between two codes, of which the lower, or the upper one, is even."""


def quantise_nvfp4(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., size] as codes [..., size / 2] uint8, the first of two in the low bits, and the
    scales of groups [..., size / 16] float8_e4m3fn.
    """
    groups = x.float().view(*x.shape[:-1], -1, GROUP)
    wanted = groups.abs().amax(-1) / LARGEST / input_scale
    scale = wanted.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    step = (scale.float() * input_scale).unsqueeze(-1)
    values = torch.where(step == 0, 0.0, groups / step).flatten(-2)
    size = values.abs()
    code = 8 * (values < 0).to(torch.uint8)
    for each in _DOWN:
        code += size > each
    for each in _UP:
        code += size >= each
    return code[..., ::2] | code[..., 1::2] << 4, scale


def dequantise_nvfp4(codes: Tensor, scale: Tensor, input_scale: Tensor) -> Tensor:
    """Return the float32 values [..., size] of what `quantise_nvfp4` returns."""
    both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    values = torch.tensor(E2M1, device=codes.device)[both.int()]
    return values * (scale.float() * input_scale).repeat_interleave(GROUP, -1)


def _fake_codes(input: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    *outer, size = input.shape
    scale = input.new_empty((*outer, size // GROUP), dtype=torch.float8_e4m3fn)
    return input.new_empty((*outer, size // 2), dtype=torch.uint8), scale


@register_op(_fake_codes, inserted=True)
def torch_rmsnorm_quant_nvfp4(
    input: Tensor, weight: Tensor, eps: float, input_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """`torch_rmsnorm` as four-bit floats.

    Args:
        input: [..., size], a multiple of 16.
        weight: [size].
        eps: added to the mean square.
        input_scale: [1] float32, of the layers behind it.

    Returns:
        Codes [..., size / 2] uint8 and scales [..., size / 16] float8_e4m3fn.
    """
    return quantise_nvfp4(torch_rmsnorm(input, weight, eps), input_scale)


@register_op(_fake_codes, inserted=True)
def torch_relu2_quant_nvfp4(input: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """relu(input) ** 2 as four-bit floats; else as `torch_rmsnorm_quant_nvfp4`."""
    return quantise_nvfp4(torch.square(F.relu(input)), input_scale)


def _fake_nvfp4_codes_linear(
    input: Tensor,
    block_scale: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    whole: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=dtype)


@register_op(_fake_nvfp4_codes_linear, inserted=True)
def torch_nvfp4_codes_linear(
    input: Tensor,
    block_scale: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    whole: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`torch_nvfp4_linear` whose input is quantised already.

    Args:
        input: [..., in / 2] uint8.
        block_scale: [..., in / 16] float8_e4m3fn.
        input_scale: [1] float32.
        weight, bias, weight_scale, whole: as in `torch_nvfp4_linear`.
        dtype: of the result.

    Returns:
        [..., out] in `dtype`, summed up in float32.
    """
    x = dequantise_nvfp4(input, block_scale, input_scale)
    values = unpacked(weight, weight_scale, None, whole, "e2m1", GROUP, x.shape[-1])
    return F.linear(x, values, None if bias is None else bias.float()).to(dtype)

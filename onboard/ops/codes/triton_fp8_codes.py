"""Norms, gates and linear layers with codes of eight-bit floats between them: how the kernels are
launched.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.codes.fp8_codes import (
    fake_fp8_codes_linear,
    fake_rmsnorm_quant_fp8,
    fake_silu_and_mul_quant_fp8,
    scale_rows,
)
from onboard.ops.library import register_op
from onboard.ops.linear.fp8_kernels import quantise
from onboard.ops.linear.fp8_linear import dequantised
from onboard.ops.linear.triton_fp8_linear import (
    few_codes,
    has_library_product,
    in_tiles,
    many_codes,
)
from onboard.ops.linear.triton_linear import MOST_ROWS, as_rows, followed
from onboard.ops.norm.triton_rmsnorm import triton_rmsnorm
from onboard.ops.triton.launch import require_device


@register_op(fake_rmsnorm_quant_fp8)
def triton_rmsnorm_quant_fp8(
    input: Tensor, weight: Tensor, eps: float, quantize: str, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`torch_rmsnorm_quant_fp8` as one kernel; two where the weight has another dtype."""
    require_device(input)
    if not input.numel():
        return fake_rmsnorm_quant_fp8(input, weight, eps, quantize)
    x, norm = as_rows(input), weight
    if weight.dtype != input.dtype:
        codes, scales = quantise(triton_rmsnorm(x, weight, eps), quantize, input_scale)
    else:
        codes, scales = quantise(x, quantize, input_scale, norm, eps)
    return codes.view(input.shape), scales.view(*input.shape[:-1], -1)


@register_op(fake_silu_and_mul_quant_fp8)
def triton_silu_and_mul_quant_fp8(
    x: Tensor, activation: str, quantize: str, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`torch_silu_and_mul_quant_fp8` as one kernel, for the activations of `KERNEL_ACTIVATIONS`."""
    require_device(x)
    if not x.numel():
        return fake_silu_and_mul_quant_fp8(x, activation, quantize)
    codes, scales = quantise(as_rows(x), quantize, input_scale, act=activation)
    return codes.view(*x.shape[:-1], -1), scales.view(*x.shape[:-1], -1)


@register_op(fake_fp8_codes_linear)
def triton_fp8_codes_linear(
    input: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """`torch_fp8_codes_linear` as one kernel for few tokens, and around the library's product for
    more.
    """
    require_device(input)
    if not input.numel():
        return fake_fp8_codes_linear(
            input, input_scale, weight, bias, weight_scale, dtype, activation=activation
        )
    codes, residual = as_rows(input), None if residual is None else as_rows(residual)
    scales = scale_rows(input_scale, len(codes)).contiguous()
    few = len(codes) <= MOST_ROWS and in_tiles(weight, weight_scale, activation)
    run = few_codes if few else _many
    y = run(codes, scales, weight, bias, weight_scale, residual, activation, dtype)
    return y.view(*input.shape[:-1], y.shape[-1])


def _many(
    codes: Tensor, x_scale: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor,
    residual: Tensor | None, act: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    how = "group" if x_scale.dim() == 2 else "token"
    if has_library_product(weight, scale, how):
        return many_codes(codes, x_scale, weight, bias, scale, how, dtype, residual, act)
    values = dequantised(codes, x_scale).to(dtype)
    y = F.linear(values, dequantised(weight, scale).to(dtype), bias)
    return followed(y, residual, act)

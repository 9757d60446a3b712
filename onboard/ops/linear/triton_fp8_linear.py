"""Linear layers with eight-bit weights: how the kernels are launched."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.few_tokens.cuda_few_tokens import BYTES, Around, product, suits
from onboard.ops.four_bits.four_bits import Words
from onboard.ops.library import register_op
from onboard.ops.linear import cuda_some_tokens
from onboard.ops.linear.cuda_some_tokens import some_tokens
from onboard.ops.linear.fp8_kernels import quantise
from onboard.ops.linear.fp8_linear import BLOCK, dequantised, fake_fused_fp8_linear
from onboard.ops.linear.triton_linear import (
    AHEAD,
    MOST_ROWS,
    Tiles,
    as_rows,
    followed,
    launch,
)
from onboard.ops.linear.triton_many_tokens import tiled_product
from onboard.ops.norm.triton_rmsnorm import triton_rmsnorm
from onboard.ops.triton.launch import is_hopper, processors, require_device


def choose_fp8_tiles(
    rows: int, outputs: int, columns: int, blocks: bool, device: torch.device
) -> Tiles:
    """Tiles for `outputs` rows of a weight; with `blocks` a step takes a block's columns.

    Measured on compute capability 9.0 over the layers of a dense model of 8 billion parameters.
    """
    if rows == 1:
        middle = columns <= 8192 and 4096 < outputs < 128 * processors(device)
        return Tiles(1, 8, 512 if middle else 1024, num_warps=4)
    tokens, many = max(16, triton.next_power_of_2(rows)), processors(device)
    if not blocks:
        if outputs >= 64 * many and tokens > 32:
            return Tiles(tokens, 128, 128, 8, 4, ahead=AHEAD)
        splits = 2 if tokens > 32 and columns > 8192 and 2 * triton.cdiv(outputs, 64) <= many else 1
        stages = 5 if outputs < 64 * many else 4
        return Tiles(tokens, 64, 256, 4, stages, splits, ahead=2 * AHEAD)
    if outputs >= 128 * many:
        return Tiles(tokens, 128, 128, 4, 4, ahead=AHEAD)
    if 3 * triton.cdiv(outputs, 64) < 2 * many:
        return Tiles(tokens, 64, 128, 4, 5, splits=4, ahead=AHEAD)
    if tokens <= 32:
        return Tiles(tokens, 64, 128, 4, 5, splits=2 if tokens == 16 else 4, ahead=AHEAD)
    return Tiles(tokens, 64, 128, 4, 8, ahead=AHEAD)


def _words(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Words:
    """Return a weight as the kernel for few tokens takes it: rows, or blocks of them, have groups of
    inputs that share a scale.
    """
    group, scale = (weight.shape[1], scale[:, None]) if scale.dim() == 1 else (BLOCK, scale)
    return Words(weight, scale, None, None, bias, BYTES, group)


def _few(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, given: Tensor | None, how: str,
    residual: Tensor | None, norm: Tensor | None, eps: float, act: str,
) -> Tensor:  # fmt: skip
    """The product for at most `MOST_ROWS` tokens; of those that another kernel computes, inputs are not
    quantised: products are exact and cost nothing.
    """
    if suits(x, words := _words(weight, scale, bias)):
        return product(x, words, Around(residual, norm, eps, bool(act), act))
    if len(x) == 1 or not how:
        tiles = choose_fp8_tiles(len(x), len(weight), x.shape[1], scale.dim() == 2, x.device)
        return launch(x, weight, bias, residual, norm, eps, act, tiles, scale)
    codes, x_scale = quantise(x, how, given, norm, eps, early=True)
    return few_codes(codes, x_scale, weight, bias, scale, residual, act, x.dtype)


def few_codes(
    codes: Tensor, x_scale: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor,
    residual: Tensor | None, act: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The product of at most `MOST_ROWS` tokens' codes."""
    if cuda_some_tokens.suits(codes, x_scale, weight, bias, scale, residual, act, dtype):
        return some_tokens(codes, x_scale, weight, bias, scale, residual, act, dtype)
    in_blocks = 2 in (scale.dim(), x_scale.dim())
    rows = max(2, len(codes))  # the kernel for one token has no scale for it
    tiles = choose_fp8_tiles(rows, len(weight), codes.shape[1], in_blocks, codes.device)
    return launch(codes, weight, bias, residual, None, 0.0, act, tiles, scale, x_scale, dtype)


def in_tiles(weight: Tensor, scale: Tensor, act: str) -> bool:
    """Tell whether a tile's gates, and what they multiply, share blocks: at most 8 rows for one
    token.
    """
    return not act or scale.dim() == 1 or len(weight) % 8 == 0


def _many(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, given: Tensor | None, how: str,
    residual: Tensor | None, norm: Tensor | None, eps: float, act: str,
) -> Tensor:  # fmt: skip
    """The product for more tokens: of quantised inputs where the library has one."""
    if how and has_library_product(weight, scale, how):
        codes, x_scale = quantise(x, how, given, norm, eps)
        return many_codes(codes, x_scale, weight, bias, scale, how, x.dtype, residual, act)
    x = x if norm is None else triton_rmsnorm(x, norm, eps)
    y = F.linear(x, dequantised(weight, scale).to(x.dtype), bias)
    return followed(y, residual, act)


def many_codes(
    codes: Tensor, x_scale: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, how: str,
    dtype: torch.dtype, residual: Tensor | None, act: str,
) -> Tensor:  # fmt: skip
    """The product of many tokens' codes where the library has one: in tiles, or the library's."""
    tiled = tiled_product(codes, weight, bias, residual, act, x_scale, scale, dtype)
    if tiled is not None:
        return tiled
    product = _blocks_product if scale.dim() == 2 else _rows_product
    y = product(codes, x_scale, weight, scale, dtype)
    return followed(y if bias is None else y + bias, residual, act)


def _rows_product(
    codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    # Sums as the kernels have them: without them the library takes a third longer
    return torch._scaled_mm(
        codes,
        weight.t(),
        scale_a=x_scale[:, None],
        scale_b=scale[None, :],
        out_dtype=dtype,
        use_fast_accum=True,
    )


def _blocks_product(
    codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    tokens, blocks = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    by_column = x_scale.t().contiguous().t()  # where the library wants the scales of tokens
    return F.scaled_mm(codes, weight.t(), by_column, tokens, scale.t(), blocks, output_dtype=dtype)


def has_library_product(weight: Tensor, scale: Tensor, how: str) -> bool:
    """Tell whether the library multiplies eight-bit floats with scales of these kinds."""
    if not is_hopper(weight.device):
        return False
    if scale.dim() == 2:
        outputs, inputs = weight.shape  # the library pads scales to four blocks of inputs
        return how == "group" and outputs % 128 == 0 and inputs % 512 == 0
    return how != "group" and not any(size % 16 for size in weight.shape)


@register_op(fake_fused_fp8_linear)
def triton_fused_fp8_linear(
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
    """`torch_fused_fp8_linear` as one kernel for few tokens, two where inputs are quantised, and
    around the library's product for more.
    """
    require_device(input)
    if not input.numel():
        return fake_fused_fp8_linear(input, weight, bias, weight_scale, activation=activation)
    x, residual = as_rows(input), None if residual is None else as_rows(residual)
    if norm_weight is not None and x.dtype == torch.float16:
        x, norm_weight = triton_rmsnorm(x, norm_weight, eps), None
    run = _few if len(x) <= MOST_ROWS and in_tiles(weight, weight_scale, activation) else _many
    y = run(
        x, weight, bias, weight_scale, input_scale, quantize, residual, norm_weight, eps, activation
    )
    return y.view(*input.shape[:-1], y.shape[-1])

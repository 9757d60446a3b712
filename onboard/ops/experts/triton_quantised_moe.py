"""Mixtures of experts with codes: how the kernels are launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from onboard.ops.experts import cuda_few_tokens_moe
from onboard.ops.experts.four_bit_moe import torch_int4_moe
from onboard.ops.experts.int8_moe import torch_int8_moe
from onboard.ops.experts.moe import fake_moe
from onboard.ops.experts.quantised_moe import torch_fp8_moe
from onboard.ops.experts.triton_moe import (
    Activation,
    Tiles,
    Weight,
    mixture,
    residual_rows,
    tiles_for,
)
from onboard.ops.four_bits.four_bits import RUN
from onboard.ops.integers.triton_int8_linear import even_step, widened
from onboard.ops.library import register_op, schema_of
from onboard.ops.triton.launch import last_contiguous, power_of_two, require_device

_ONE_TOKEN = 16
"""Pairs of one token at most: so few programs that narrow ones are the faster."""
_SCHEMA = schema_of(torch_fp8_moe.__name__)


def eight_bit_tiles(pairs: int, experts: int, dtype: torch.dtype, in_blocks: bool) -> Tiles:
    """Return the tiles of a product with weights in float8, from the number of pairs that an expert
    has on average; with `in_blocks` each step's products have a scale, and are held beside the sums.

    Measured on compute capability 9.0 over 128 experts of 2048 x 768.
    """
    if dtype == torch.float32:
        return tiles_for(pairs, experts, dtype)
    if pairs <= _ONE_TOKEN:
        return Tiles(16, 32, 128, 4, 4)
    if pairs <= 12 * experts:
        return Tiles(16, 64, 128, 4, 3)
    if in_blocks or pairs <= 128 * experts:
        return Tiles(64, 128, 128, 4, 4)
    return Tiles(128, 256, 128, 8, 3)


@register_op(fake_moe, schema=_SCHEMA)
def triton_fp8_moe(*arguments: Any, **keywords: Any) -> Tensor:
    """`torch_fp8_moe` as the kernels of `triton_moe_fused`; a single token's inputs are not
    quantised: its products are exact and cost nothing.
    """
    return _mixture(*arguments, **keywords)


@register_op(fake_moe, schema=_SCHEMA)
def triton_finegrained_fp8_moe(*arguments: Any, **keywords: Any) -> Tensor:
    """`torch_finegrained_fp8_moe` as the same kernels."""
    return _mixture(*arguments, **keywords)


def _mixture(
    x: Tensor, selected_experts: Tensor, routing_weights: Tensor,
    w3_w1_stacked_weight: Tensor, w2_stacked_weight: Tensor,
    w3_w1_weight_scale: Tensor, w2_weight_scale: Tensor,
    is_gated_mlp: bool = True, act_fn: str = "silu",
    w3_w1_stacked_bias: Tensor | None = None, w2_stacked_bias: Tensor | None = None,
    limit: float | None = None, alpha: float | None = None, up_offset: float = 0.0,
    gate_cap: float | None = None, up_cap: float | None = None,
    order: str = "up_gate", quantize: str = "",
    w3_w1_input_scale: Tensor | None = None, w2_input_scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert gate_cap is None, "no kernel caps the gate"
    assert up_cap is None, "no kernel caps what is gated"
    up = Weight(w3_w1_stacked_weight, w3_w1_stacked_bias, w3_w1_weight_scale, w3_w1_input_scale)
    down = Weight(w2_stacked_weight, w2_stacked_bias, w2_weight_scale, w2_input_scale)
    activation = Activation(is_gated_mlp, act_fn, limit, alpha, up_offset, order)
    in_blocks = w2_weight_scale.dim() == 3
    tiles = eight_bit_tiles(selected_experts.numel(), len(w2_stacked_weight), x.dtype, in_blocks)
    how = "" if x.numel() == x.shape[-1] else quantize
    return _launch(x, selected_experts, routing_weights, up, down, activation, tiles, how, residual)


def _launch(
    x: Tensor, selected: Tensor, routing: Tensor, up: Weight, down: Weight,
    activation: Activation, tiles: Tiles, quantize: str, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the mixture by the kernels for few tokens where these take it, else by those in tiles."""
    require_device(x)
    tokens = last_contiguous(x.reshape(-1, x.shape[-1]))
    if not tokens.numel():
        return fake_moe(x)
    selected = selected.reshape(len(tokens), -1).contiguous()
    routing = routing.reshape(len(tokens), -1).contiguous()
    given, added = (tokens, selected, routing, up, down, activation), residual_rows(residual)
    if cuda_few_tokens_moe.takes(*given):
        return cuda_few_tokens_moe.mixture(*given, added).view(x.shape)
    return mixture(*given, tiles, quantize, added).view(x.shape)


def four_bit_tiles(pairs: int, experts: int) -> Tiles:
    """Return the tiles of a product with four-bit weights, from the number of pairs that an expert
    has on average.

    Measured on compute capability 9.0 over 128 experts of 2048 x 768 in int4, and 32 of 2880 x 2880
    in MXFP4.
    """
    if pairs <= _ONE_TOKEN:
        return Tiles(16, 32, RUN, 2, 4)
    rows = max(16, power_of_two(triton.cdiv(pairs, experts)))
    return Tiles(rows, 64, RUN, 4, 3) if rows < 64 else Tiles(min(128, rows), 128, RUN, 8, 3)


_FOUR_BITS = schema_of(torch_int4_moe.__name__)


@register_op(fake_moe, schema=_FOUR_BITS)
def triton_int4_moe(*arguments: Any, **keywords: Any) -> Tensor:
    """`torch_int4_moe` as the kernels of `triton_moe_fused`, which decode what they read."""
    return _four_bits("int4", *arguments, **keywords)


@register_op(fake_moe, schema=_FOUR_BITS)
def triton_mxfp4_moe(*arguments: Any, **keywords: Any) -> Tensor:
    """`torch_mxfp4_moe` as the same kernels."""
    return _four_bits("e2m1", *arguments, **keywords)


@register_op(fake_moe, schema=_FOUR_BITS)
def triton_nvfp4_moe(*arguments: Any, **keywords: Any) -> Tensor:
    """`torch_nvfp4_moe` as the same kernels."""
    return _four_bits("e2m1", *arguments, **keywords)


def _four_bits(
    levels: str, x: Tensor, selected_experts: Tensor, routing_weights: Tensor,
    w3_w1_stacked_weight: Tensor, w2_stacked_weight: Tensor,
    w3_w1_weight_scale: Tensor, w2_weight_scale: Tensor,
    w3_w1_weight_zero: Tensor | None = None, w2_weight_zero: Tensor | None = None,
    w3_w1_weight_whole: Tensor | None = None, w2_weight_whole: Tensor | None = None,
    group: int = 128, is_gated_mlp: bool = True, act_fn: str = "silu",
    w3_w1_stacked_bias: Tensor | None = None, w2_stacked_bias: Tensor | None = None,
    limit: float | None = None, alpha: float | None = None, up_offset: float = 0.0,
    gate_cap: float | None = None, up_cap: float | None = None, order: str = "up_gate",
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert gate_cap is None, "no kernel caps the gate"
    assert up_cap is None, "no kernel caps what is gated"
    up = Weight(
        w3_w1_stacked_weight, w3_w1_stacked_bias, w3_w1_weight_scale, None,
        levels, group, w3_w1_weight_zero, w3_w1_weight_whole,
    )  # fmt: skip
    down = Weight(
        w2_stacked_weight, w2_stacked_bias, w2_weight_scale, None,
        levels, group, w2_weight_zero, w2_weight_whole,
    )  # fmt: skip
    activation = Activation(is_gated_mlp, act_fn, limit, alpha, up_offset, order)
    tiles = four_bit_tiles(selected_experts.numel(), len(w2_stacked_weight))
    return _launch(x, selected_experts, routing_weights, up, down, activation, tiles, "", residual)


@register_op(fake_moe, schema=schema_of(torch_int8_moe.__name__))
def triton_int8_moe(
    x: Tensor, selected_experts: Tensor, routing_weights: Tensor,
    w3_w1_stacked_weight: Tensor, w2_stacked_weight: Tensor,
    w3_w1_weight_scale: Tensor, w2_weight_scale: Tensor,
    w3_w1_weight_offset: Tensor | None = None, w2_weight_offset: Tensor | None = None,
    group: int = 128, is_gated_mlp: bool = True, act_fn: str = "silu",
    w3_w1_stacked_bias: Tensor | None = None, w2_stacked_bias: Tensor | None = None,
    limit: float | None = None, alpha: float | None = None, up_offset: float = 0.0,
    gate_cap: float | None = None, up_cap: float | None = None,
    order: str = "up_gate", quantize: str = "",
    w3_w1_input_scale: Tensor | None = None, w2_input_scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`torch_int8_moe` as the kernels of `triton_moe_fused`; a single token's inputs are not
    quantised, as those of `triton_fp8_moe`.
    """
    assert gate_cap is None, "no kernel caps the gate"
    assert up_cap is None, "no kernel caps what is gated"
    how = "" if x.numel() == x.shape[-1] else quantize
    activation = Activation(is_gated_mlp, act_fn, limit, alpha, up_offset, order)
    tiles = tiles_for(selected_experts.numel(), len(w2_stacked_weight), x.dtype)
    up = _integers(
        w3_w1_stacked_weight, w3_w1_stacked_bias, w3_w1_weight_scale, w3_w1_weight_offset,
        w3_w1_input_scale, group, how,
    )  # fmt: skip
    down = _integers(
        w2_stacked_weight, w2_stacked_bias, w2_weight_scale, w2_weight_offset,
        w2_input_scale, group, how,
    )  # fmt: skip
    if not how:
        step = min(even_step(each.group) for each in (up, down))
        tiles = replace(tiles, k=min(tiles.k, step))
    return _launch(x, selected_experts, routing_weights, up, down, activation, tiles, how, residual)


def _integers(
    codes: Tensor, bias: Tensor | None, scale: Tensor, offset: Tensor | None,
    input_scale: Tensor | None, group: int, how: str,
) -> Weight:  # fmt: skip
    """Return weights of all experts: of rows where inputs are integers, too, else of groups."""
    if how:
        return Weight(codes, bias, scale[..., 0].float(), input_scale)
    return Weight(codes, bias, scale, None, "int8", widened(group, codes.shape[-1]), offset)

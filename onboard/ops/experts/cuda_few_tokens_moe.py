"""Mixtures of experts with weights of four bits or eight on Hopper GPUs: of one token two kernels, the
second of which adds up what the experts bring; of some tokens the same kernel over sorted pairs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from onboard.ops.experts.triton_moe import Activation, Weight, combined, route
from onboard.ops.few_tokens.cuda_few_tokens import (
    BYTES,
    Around,
    Blocks,
    Experts,
    Tiles,
    batch_of,
    product,
    product_of_blocks,
    runs_of,
    suits_routing,
    suits_weight,
    turns,
)
from onboard.ops.four_bits.four_bits import RUN, Words
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.ops.triton.launch import power_of_two, processors

MOST_CHOICES = 16
"""Experts of a token: each has a warp of its own in a program of the second kernel."""
_MOST_INPUTS = 384 * RUN
"""Of all experts together, that a program's memory holds."""
_MOST_EACH = 12
"""Pairs of an expert on average: it seldom has more than sixteen, which weights are read once for."""
_NUMBERS, _BESIDE_RINGS, _BESIDE_PARTS = 96 * 1024, 74 * 1024, 79 * 1024
"""Of a block's inputs, that a program's memory holds: alone, beside the rings of its warps, and beside
parts of sums.
"""
_OWN, _SHARED = Tiles(1, 16, batch=2, resident=1), Tiles(8, 2, batch=2, resident=1)
"""Of blocks: warps have all of their rows' inputs, or share them where a program has no room for these."""


def takes(
    x: Tensor, selected: Tensor, routing: Tensor, up: Weight, down: Weight, activation: Activation
) -> bool:  # fmt: skip
    """Whether the kernels compute the mixture of tokens x [tokens, hidden]."""
    roles = _roles(activation)
    inner = up.values.shape[1] // roles
    few = (
        selected.numel() <= MOST_CHOICES and power_of_two(selected.numel()) * inner <= _MOST_INPUTS
        if len(x) == 1
        else up.levels is not None and selected.numel() <= _MOST_EACH * len(down.values)
    )
    return (
        few
        and x.is_contiguous()
        and x.storage_offset() % 4 == 0
        and suits_routing(routing)
        and _has_words(up, 1 if activation.order == "interleaved" else roles)
        and _has_words(down, 1)
        and suits_weight(x.device, x.dtype, x.shape[1], _words(up))
        and suits_weight(x.device, x.dtype, inner, _words(down))
    )


def mixture(
    x: Tensor, selected: Tensor, routing: Tensor, up: Weight, down: Weight, activation: Activation,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the mixture's output [tokens, hidden] of x, with experts and weights [tokens, top], to which
    `residual` [tokens, hidden] is added.
    """
    first = Around(
        gated=activation.gated, activation=activation.name, order=activation.order,
        limit=activation.limit, alpha=activation.alpha, offset=activation.up_offset,
    )  # fmt: skip
    weights = routing.reshape(-1).contiguous()
    if len(x) == 1:
        return _of_one(x, selected.reshape(-1).long(), weights, up, down, first, residual)
    return _of_some(x, selected, weights, up, down, first, residual)


def _of_one(
    x: Tensor, chosen: Tensor, routing: Tensor, up: Weight, down: Weight, first: Around,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    experts, one, two = len(down.values), _words(up), _words(down)
    tiles = Tiles(
        2, 3, batch=batch_of(one, x.shape[1], 2), resident=2
    )  # twelve warps of a processor
    middle = product(x, one, first, tiles, Experts(chosen, experts))
    routed = Experts(chosen, experts, routing)
    summed = _summed(two, middle.shape[1], len(middle), processors(x.device))
    return product(middle, two, Around(residual), summed, routed)


def _summed(down: Words, inputs: int, pairs: int, many: int) -> Tiles:
    """Return the tiles of the second product, of so many processors: as many rows as leave none idle,
    and batches that end where a warp's runs do.
    """
    warps = 8 // power_of_two(pairs) or 1  # of an expert
    batch = batch_of(down, inputs, warps)
    low, high = (Tiles(8, height, batch=batch, resident=1) for height in (1, 2))
    rows = down.values.shape[1]
    if turns(rows, low, many) >= turns(rows, high, many):
        return high
    runs = runs_of(down, inputs, warps)
    ends = batch == 4 and -(-runs // 6) * 6 <= -(-runs // 4) * 4
    return replace(low, batch=6) if ends else low


def _of_some(
    x: Tensor, selected: Tensor, routing: Tensor, up: Weight, down: Weight, first: Around,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """The mixture over blocks of an expert's pairs, eight where few have more."""
    experts, top = len(down.values), selected.shape[1]
    columns = 8 if selected.numel() <= 4 * experts else 16
    routed = route(selected, experts, columns)
    assert routed.order is not None, "pairs of some tokens are sorted"
    sorted_pairs = (routed.blocks, routed.order, experts)
    middle = product_of_blocks(
        x, _words(up), first, Blocks(*sorted_pairs, top), columns, _in_blocks(columns, x.shape[1])
    )
    weighed = Blocks(*sorted_pairs, routing=routing)
    tiles = _in_blocks(columns, middle.shape[1])
    parts = product_of_blocks(middle, _words(down), Around(), weighed, columns, tiles)
    return combined(parts, selected, experts, residual)


def _in_blocks(columns: int, inputs: int) -> Tiles:
    """Return the tiles of blocks: programs of a cluster share inputs that one has no room for."""
    if columns * inputs > _NUMBERS:
        return replace(_SHARED, cluster=power_of_two(-(-columns * inputs // _BESIDE_PARTS)))
    return replace(_OWN, ring=2) if columns * inputs <= _BESIDE_RINGS else _OWN


def _roles(activation: Activation) -> int:
    return 2 if activation.gated else 1


def _has_words(weight: Weight, parts: int) -> bool:
    """Whether codes are words, or bytes of floats: of these each of the parts, one behind the other,
    has whole blocks, if blocks share a scale.
    """
    if weight.levels is not None:
        return weight.levels != "int8"
    of_rows = weight.scale is not None and weight.scale.dim() == 2
    return weight.values.dtype == torch.float8_e4m3fn and (
        of_rows or weight.values.shape[1] % (parts * BLOCK) == 0
    )


def _words(weight: Weight) -> Words:
    values, scale = weight.values, weight.scale
    assert scale is not None, "codes have scales"
    if weight.levels is not None:
        return Words(
            values, scale, weight.zero, weight.whole, weight.bias, weight.levels, weight.group
        )
    group = values.shape[-1] if scale.dim() == 2 else BLOCK
    return Words(
        values,
        scale if scale.dim() == 3 else scale[..., None],
        None,
        None,
        weight.bias,
        BYTES,
        group,
    )

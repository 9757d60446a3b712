"""Mixture of experts over stacked weights: how its kernels are launched.

A single token's experts are all different, so that its pairs need no sorting; otherwise they are
sorted by expert on the device. Nothing waits for the device, and every grid follows from shapes
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from onboard.ops.experts.fused_moe import torch_moe_fused
from onboard.ops.experts.moe import fake_moe
from onboard.ops.experts.moe_kernels import (
    combine_experts_kernel,
    down_kernel,
    up_kernel,
)
from onboard.ops.experts.sort_kernels import count_kernel, place_kernel, sort_kernel
from onboard.ops.four_bits.four_bit_kernels import HAS_PTX
from onboard.ops.library import register_op, schema_of
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.linear.fp8_kernels import quantise
from onboard.ops.triton.launch import (
    dot_type,
    last_contiguous,
    overlaps,
    power_of_two,
    require_device,
)

SORT_ELEMENTS = 8192
"""Numbers of a tile of the sort."""
PLACED = 32
"""Pairs that a program of the sort places at a time."""
FEW_PAIRS = 1024
"""Most pairs that are sorted by looking at all others."""
MOST_CHUNKS = 64
COMBINE_BLOCK = 1024


@dataclass(frozen=True)
class Tiles:
    """The tiles of a product: rows, channels of weights read at once, depth; and how programs
    run.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Routed:
    """The pairs of tokens and experts, sorted by expert."""

    order: Tensor | None
    """[pairs] int32: which pair has a place; None: they are not sorted."""
    blocks: Tensor
    """[blocks, 3] int32: expert, first place, end of the expert's places; not sorted: the expert of
    each pair.
    """

    @property
    def num_blocks(self) -> int:
        """Programs that a slice of the weights needs at most."""
        return self.blocks.numel() if self.order is None else len(self.blocks)


@dataclass(frozen=True)
class Weight:
    """What one of the products reads of all experts."""

    values: Tensor
    """[experts, rows, inputs]; with a scale they are float8_e4m3fn or int8."""
    bias: Tensor | None
    scale: Tensor | None = None
    """Of rows [experts, rows] or of blocks of 128 x 128 [experts, blocks, blocks], float32."""
    input_scale: Tensor | None = None
    """[experts] float32, where inputs are quantised with it."""
    levels: str | None = None
    """Of four-bit codes, of which `values` are words (see `four_bits.Levels`); or "int8"."""
    group: int = 0
    """With levels: inputs that share a scale [experts, rows, groups], and a zero."""
    zero: Tensor | None = None
    """Codes of zero; of integers of eight bits what is added, float32."""
    whole: Tensor | None = None
    """[experts, rows] float32."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return what kernels take beside the codes."""
        return self.scale, self.zero, self.whole

    def constants(self) -> dict[str, Any]:
        """Return the kernels' compile-time arguments."""
        scale = self.scale if self.levels is None else None
        return {
            # 0 there are none, 1 of rows, 2 of blocks
            "SCALES": 0 if scale is None else scale.dim() - 1,
            "LEVELS": self.levels,
            "GROUP": self.group,
            "HAS_ZERO": self.zero is not None,
            "HAS_WHOLE": self.whole is not None,
            "PTX": HAS_PTX,
        }


@dataclass(frozen=True)
class Inputs:
    """Rows that a product reads."""

    rows: Tensor
    scale: Tensor | None
    scales: int
    """0 there are none, 1 of rows, 2 of groups of 128, 3 of experts: rows are quantised as they are
    read.
    """
    dtype: torch.dtype
    """What is multiplied."""

    @staticmethod
    def of(rows: Tensor, quantize: str, weight: Weight) -> Inputs:
        """Return rows, quantised as the weight is if they are to be; see `quantise_rows`."""
        dtype = weight.values.dtype if quantize else rows.dtype
        if quantize in ("token", "group"):
            codes, scale = quantise(rows.contiguous(), quantize, None, dtype=dtype)
            return Inputs(codes, scale, 2 if quantize == "group" else 1, dtype)
        return Inputs(rows, weight.input_scale if quantize else None, 3 if quantize else 0, dtype)


@dataclass(frozen=True)
class Activation:
    """What comes between the products."""

    gated: bool
    name: str
    limit: float | None
    alpha: float | None
    up_offset: float
    order: str = "up_gate"
    """Where the rows of up and gate are."""

    def scalars(self) -> tuple[float, float, float]:
        """Return the kernels' numbers."""
        return self.limit or 0.0, self.alpha or 0.0, self.up_offset

    def constants(self) -> dict[str, Any]:
        """Return the kernels' compile-time arguments."""
        return {
            "GATED": self.gated,
            "ORDER": self.order,
            "ACTIVATION": KERNEL_ACTIVATIONS.get(self.name, "silu"),
            "HAS_LIMIT": self.limit is not None,
            "HAS_ALPHA": self.alpha is not None,
        }


def tiles_for(pairs: int, experts: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles of a product, from the number of pairs that an expert has on average."""
    if dtype == torch.float32:
        return Tiles(16, 64, 32, 4, 2)
    each = pairs / experts
    if each <= 12:
        return Tiles(16, 64, 128, 4, 3)
    if each <= 48:
        return Tiles(64, 128, 64, 4, 4)
    return Tiles(128, 256, 64, 8, 4)


def invariant_tiles(dtype: torch.dtype) -> Tiles:
    """Return tiles that do not depend on the number of pairs, with the instruction of large
    ones.
    """
    return Tiles(16, 64, 32, 4, 2) if dtype == torch.float32 else Tiles(64, 128, 64, 4, 4)


_SCHEMA = schema_of(torch_moe_fused.__name__)


@register_op(fake_moe, schema=_SCHEMA)
def triton_moe_fused(*arguments: Any, **keywords: Any) -> Tensor:
    """`torch_moe_fused` as kernels: a sort, two grouped products and the sum; products add up in
    float32.

    There is no kernel for caps: whoever puts this op in another's place leaves those that have one
    alone.
    """
    return _fused(False, *arguments, **keywords)


@register_op(fake_moe, schema=_SCHEMA, invariant_form_of="triton_moe_fused")
def invariant_moe_fused(*arguments: Any, **keywords: Any) -> Tensor:
    """`triton_moe_fused` whose rows are the same, bit for bit, whatever other rows there are."""
    return _fused(True, *arguments, **keywords)


def _fused(
    invariant: bool, x: Tensor, selected_experts: Tensor, routing_weights: Tensor,
    w3_w1_stacked_weight: Tensor, w2_stacked_weight: Tensor,
    is_gated_mlp: bool = True, act_fn: str = "silu",
    w3_w1_stacked_bias: Tensor | None = None, w2_stacked_bias: Tensor | None = None,
    limit: float | None = None, alpha: float | None = None, up_offset: float = 0.0,
    gate_cap: float | None = None, up_cap: float | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert gate_cap is None, "no kernel caps the gate"
    assert up_cap is None, "no kernel caps what is gated"
    require_device(x)
    tokens = last_contiguous(x.reshape(-1, x.shape[-1]))
    selected = selected_experts.reshape(len(tokens), -1).contiguous()
    routing = routing_weights.reshape(len(tokens), -1).contiguous()
    if not tokens.numel():
        return fake_moe(x)
    up = Weight(w3_w1_stacked_weight, w3_w1_stacked_bias)
    down = Weight(w2_stacked_weight, w2_stacked_bias)
    tiles = (
        invariant_tiles(x.dtype)
        if invariant
        else tiles_for(selected.numel(), len(w2_stacked_weight), x.dtype)
    )
    activation = Activation(is_gated_mlp, act_fn, limit, alpha, up_offset)
    added = residual_rows(residual)
    y = mixture(tokens, selected, routing, up, down, activation, tiles, residual=added)
    return y.view(x.shape)


def residual_rows(residual: Tensor | None) -> Tensor | None:
    """Return what is added to a mixture's output as rows [tokens, hidden] without gaps."""
    return None if residual is None else residual.reshape(-1, residual.shape[-1]).contiguous()


def mixture(
    x: Tensor, selected: Tensor, routing: Tensor, up: Weight, down: Weight,
    activation: Activation, tiles: Tiles, quantize: str = "", residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the mixture's output [tokens, hidden], each chosen expert's weights read once a block
    of its tokens.

    With `quantize` the inputs of both products are quantised so; `residual` [tokens, hidden] is added.
    """
    (tokens, top), experts, hidden = selected.shape, len(down.values), x.shape[1]
    inner = up.values.shape[1] // (2 if activation.gated else 1)
    routed = Routed(None, selected) if tokens == 1 else route(selected, experts, tiles.m)
    middle, parts = x.new_empty(tokens * top, inner), x.new_empty(tokens * top, hidden)
    _up(middle, Inputs.of(x, quantize, up), up, inner, activation, routed, top, tiles)
    _down(parts, Inputs.of(middle, quantize, down), down, routing, routed, tiles)
    return combined(parts, selected, experts, residual)


def combined(parts: Tensor, selected: Tensor, experts: int, residual: Tensor | None) -> Tensor:
    """Return the sum [tokens, hidden] of what the experts that are here bring, parts [pairs, hidden],
    and of `residual`.
    """
    (tokens, top), hidden = selected.shape, parts.shape[1]
    out = parts.new_empty(tokens, hidden)
    block = min(COMBINE_BLOCK, power_of_two(hidden))
    combine_experts_kernel[(tokens, triton.cdiv(hidden, block))](
        out, parts, selected, residual, TOP=top, N=hidden, EXPERTS=experts, HAS_RESIDUAL=residual is not None,
        BLOCK=block, **overlaps(out.device),
    )  # fmt: skip
    return out


def _up(
    out: Tensor, inputs: Inputs, weight: Weight, inner: int,
    activation: Activation, routed: Routed, top: int, tiles: Tiles,
) -> None:  # fmt: skip
    """Write the activated first product of every pair, [pairs, inner]."""
    experts, hidden = len(weight.values), inputs.rows.shape[1]
    channels = tiles.n // 2 if activation.gated else tiles.n
    up_kernel[(triton.cdiv(inner, channels), routed.num_blocks)](
        out, inputs.rows, weight.values, weight.bias, inputs.scale, *weight.tensors(), routed.order, routed.blocks,
        *activation.scalars(), inputs.rows.stride(0),
        PAIRS=routed.order is None, EXPERTS=experts, TOP=top, K=hidden, N=inner, HAS_BIAS=weight.bias is not None,
        **activation.constants(), DOT_TYPE=dot_type(inputs.dtype), X_SCALES=inputs.scales, **weight.constants(),
        BLOCK_M=tiles.m, BLOCK_N=channels, BLOCK_K=tiles.k, STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **overlaps(out.device),
    )  # fmt: skip


def _down(
    out: Tensor, inputs: Inputs, weight: Weight, routing: Tensor, routed: Routed, tiles: Tiles
) -> None:
    """Write the second product of every pair, times its routing weight, [pairs, hidden]."""
    (experts, hidden), inner = weight.values.shape[:2], inputs.rows.shape[1]
    down_kernel[(triton.cdiv(hidden, tiles.n), routed.num_blocks)](
        out, inputs.rows, weight.values, weight.bias, inputs.scale, *weight.tensors(), routing,
        routed.order, routed.blocks,
        PAIRS=routed.order is None, EXPERTS=experts, K=inner, N=hidden, HAS_BIAS=weight.bias is not None,
        DOT_TYPE=dot_type(inputs.dtype), X_SCALES=inputs.scales, **weight.constants(),
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **overlaps(out.device),
    )  # fmt: skip


def route(selected: Tensor, experts: int, rows: int) -> Routed:
    """Sort pairs by expert and cut each expert's into blocks of `rows`."""
    pairs, block_e = selected.numel(), power_of_two(experts)
    blocks = min(experts, pairs) + pairs // rows
    order = torch.empty(pairs, dtype=torch.int32, device=selected.device)
    table = torch.empty((blocks, 3), dtype=torch.int32, device=selected.device)
    counted = max(1, min(SORT_ELEMENTS // block_e, power_of_two(pairs)))
    placed = min(PLACED, power_of_two(pairs))
    sizes: dict[str, Any] = {
        "EXPERTS": experts,
        "BLOCK_E": block_e,
        "ROWS": counted,
        "num_warps": 4,
    }
    tiles = {
        "BLOCK_M": rows,
        "PLACED": placed,
        "COMPARED": min(SORT_ELEMENTS // placed, power_of_two(pairs)),
    }
    if pairs <= FEW_PAIRS:
        sort_kernel[(triton.cdiv(pairs, placed),)](
            order, table, selected, pairs, blocks, **sizes, **tiles, **overlaps(selected.device)
        )
        return Routed(order, table)
    chunk = placed * triton.cdiv(pairs, placed * MOST_CHUNKS)
    chunks = triton.cdiv(pairs, chunk)
    counts, starts = torch.empty((2, chunks, block_e), dtype=torch.int32, device=selected.device)
    count_kernel[(chunks,)](counts, selected, pairs, chunk, **sizes)
    place_kernel[(chunks,)](
        order, table, counts, starts, selected, pairs, chunk, chunks, blocks,
        **sizes, **tiles, MOST_CHUNKS=power_of_two(chunks),
    )  # fmt: skip
    return Routed(order, table)

"""Mixtures of experts that compute with codes: references, which run everywhere.

The schemes are those of `onboard.ops.linear.fp8_linear`, a scale an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.errors import UsageError
from onboard.ops.experts.moe import expert_activation, fake_moe, gated, run_experts
from onboard.ops.library import register_op, schema_of
from onboard.ops.linear.fp8_linear import dequantised, quantise_rows

ROW_ORDERS = ("up_gate", "gate_up", "interleaved")
"""Where a stack's rows of up and gate are: one behind the other, or each gate's before its up's."""


def gate_and_up(rows: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Return the gate's and the up projection's part of the last dimension of `rows`.

    Raises `UsageError` for an unknown order.
    """
    if order not in ROW_ORDERS:
        raise UsageError(f"unknown order of rows {order!r}", hint=f"Known: {', '.join(ROW_ORDERS)}")
    if order == "interleaved":
        return rows[..., ::2], rows[..., 1::2]
    first, second = rows.chunk(2, dim=-1)
    return (second, first) if order == "up_gate" else (first, second)


def expert_weight(codes: Tensor, scale: Tensor, parts: int = 1) -> Tensor:
    """Return the float32 values of one expert's codes [rows, inputs].

    Args:
        codes: float8_e4m3fn [rows, inputs].
        scale: of rows [rows], or of blocks of 128 x 128 [parts * ceil(rows / parts / 128),
            ceil(inputs / 128)], float32.
        parts: how many weights, one behind the other, `codes` are; a block is in one of them.
    """
    pieces = scale.chunk(parts) if scale.dim() == 2 else [scale]
    cut = zip(codes.chunk(len(pieces)), pieces, strict=True)
    return torch.cat([dequantised(each, its_scale) for each, its_scale in cut])


@dataclass(frozen=True)
class _Product:
    """One of the two products of all experts."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    parts: int

    def of(self, rows: Tensor, expert: int, quantize: str) -> Tensor:
        """Return an expert's product with rows [tokens, inputs], float32."""
        given = self.input_scale if self.input_scale is None else self.input_scale[expert]
        rows = dequantised(*quantise_rows(rows, quantize, given)) if quantize else rows.float()
        weight = expert_weight(self.codes[expert], self.scale[expert], self.parts)
        return F.linear(rows, weight, None if self.bias is None else self.bias[expert].float())


@register_op(fake_moe, inserted=True, experts=True, feed_forward=True)
def torch_fp8_moe(
    x: Tensor,
    selected_experts: Tensor,
    routing_weights: Tensor,
    w3_w1_stacked_weight: Tensor,
    w2_stacked_weight: Tensor,
    w3_w1_weight_scale: Tensor,
    w2_weight_scale: Tensor,
    is_gated_mlp: bool = True,
    act_fn: str = "silu",
    w3_w1_stacked_bias: Tensor | None = None,
    w2_stacked_bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float | None = None,
    up_offset: float = 0.0,
    gate_cap: float | None = None,
    up_cap: float | None = None,
    order: str = "up_gate",
    quantize: str = "",
    w3_w1_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`torch_moe_fused` whose weights are float8_e4m3fn with scales of rows.

    Args:
        x, selected_experts, routing_weights, residual: as for `torch_moe_fused`.
        w3_w1_stacked_weight: [experts, 2 * intermediate, hidden] float8_e4m3fn (half as many rows
            unless gated).
        w2_stacked_weight: [experts, hidden, intermediate] float8_e4m3fn.
        w3_w1_weight_scale, w2_weight_scale: [experts, rows] float32.
        is_gated_mlp, act_fn, limit, alpha, up_offset, gate_cap, up_cap: as for `torch_moe`.
        w3_w1_stacked_bias, w2_stacked_bias: [experts, rows] or None.
        order: where the rows of up and gate are, one of `ROW_ORDERS`.
        quantize: how the inputs of both products are quantised: "token", "group", "tensor"; "" not
            at all.
        w3_w1_input_scale, w2_input_scale: [experts] float32, for quantize "tensor".

    Returns:
        [..., hidden] in x's dtype; products are summed up in float32, and what is between them is
        rounded to that dtype.

    Raises:
        UsageError: unknown activation or order.
    """
    act = expert_activation(act_fn, alpha, gate_cap)
    both = 2 if is_gated_mlp and order != "interleaved" else 1
    first = _Product(
        w3_w1_stacked_weight, w3_w1_weight_scale, w3_w1_stacked_bias, w3_w1_input_scale, both
    )
    second = _Product(w2_stacked_weight, w2_weight_scale, w2_stacked_bias, w2_input_scale, 1)

    def expert(index: int, chosen: Tensor) -> Tensor:
        rows = first.of(chosen, index, quantize)
        gate, up = gate_and_up(rows, order) if is_gated_mlp else (rows, None)
        middle = gated(gate, up, act, limit, up_offset, up_cap).to(x.dtype)
        return second.of(middle, index, quantize)

    count = len(w2_stacked_weight)
    return run_experts(x, selected_experts, routing_weights, count, expert, residual)


_SCHEMA = schema_of(torch_fp8_moe.__name__)


@register_op(fake_moe, schema=_SCHEMA, inserted=True, experts=True, feed_forward=True)
def torch_finegrained_fp8_moe(*arguments: Any, **keywords: Any) -> Tensor:
    """As `torch_fp8_moe`, with scales of blocks of 128 x 128: [experts, ceil(rows / 128), ceil(inputs
    / 128)] float32; up and gate have blocks of their own unless their rows are interleaved.
    """
    return torch_fp8_moe(*arguments, **keywords)

"""Mixtures of experts whose weights have four bits: references, which run everywhere.

`onboard.ops.four_bits.four_bits` has the layout of the weights; inputs are not quantised.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from onboard.ops.experts.moe import expert_activation, fake_moe, gated, run_experts
from onboard.ops.experts.quantised_moe import gate_and_up
from onboard.ops.four_bits.four_bits import Words, unpacked
from onboard.ops.library import register_op, schema_of


def _product(stack: Words, rows: Tensor, expert: int) -> Tensor:
    """Return an expert's product with rows [tokens, inputs], float32."""
    zero, whole, bias = (
        None if each is None else each[expert] for each in (stack.zero, stack.whole, stack.bias)
    )
    words, scale = stack.values[expert], stack.scale[expert]
    weight = unpacked(words, scale, zero, whole, stack.levels, stack.group, rows.shape[-1])
    return F.linear(rows.float(), weight, None if bias is None else bias.float())


def _mixture(
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
    act = expert_activation(act_fn, alpha, gate_cap)
    first = Words(
        w3_w1_stacked_weight, w3_w1_weight_scale, w3_w1_weight_zero, w3_w1_weight_whole,
        w3_w1_stacked_bias, levels, group,
    )  # fmt: skip
    second = Words(
        w2_stacked_weight, w2_weight_scale, w2_weight_zero, w2_weight_whole,
        w2_stacked_bias, levels, group,
    )  # fmt: skip

    def expert(index: int, chosen: Tensor) -> Tensor:
        rows = _product(first, chosen, index)
        gate, up = gate_and_up(rows, order) if is_gated_mlp else (rows, None)
        middle = gated(gate, up, act, limit, up_offset, up_cap).to(x.dtype)
        return _product(second, middle, index)

    count = len(w2_stacked_weight)
    return run_experts(x, selected_experts, routing_weights, count, expert, residual)


@register_op(fake_moe, inserted=True, experts=True, feed_forward=True)
def torch_int4_moe(
    x: Tensor,
    selected_experts: Tensor,
    routing_weights: Tensor,
    w3_w1_stacked_weight: Tensor,
    w2_stacked_weight: Tensor,
    w3_w1_weight_scale: Tensor,
    w2_weight_scale: Tensor,
    w3_w1_weight_zero: Tensor | None = None,
    w2_weight_zero: Tensor | None = None,
    w3_w1_weight_whole: Tensor | None = None,
    w2_weight_whole: Tensor | None = None,
    group: int = 128,
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
    residual: Tensor | None = None,
) -> Tensor:
    """`torch_moe_fused` whose weights are integers of four bits, as `torch_int4_linear` has them.

    Args:
        x, selected_experts, routing_weights, residual: as for `torch_moe_fused`.
        w3_w1_stacked_weight: [experts, 2 * intermediate, 16 * ceil(hidden / 128)] int32 (half as
            many rows unless gated): eight codes a word, as `four_bits` lays them.
        w2_stacked_weight: [experts, hidden, 16 * ceil(intermediate / 128)] int32.
        w3_w1_weight_scale, w2_weight_scale: [experts, rows, ceil(inputs / group)].
        w3_w1_weight_zero, w2_weight_zero: the same, as `torch_int4_linear` has them.
        w3_w1_weight_whole, w2_weight_whole: None; `torch_nvfp4_moe` has them.
        group: 16, 32, 64, or at least 128.
        is_gated_mlp, act_fn, limit, alpha, up_offset, gate_cap, up_cap: as for `torch_moe`.
        w3_w1_stacked_bias, w2_stacked_bias: [experts, rows] or None.
        order: where the rows of up and gate are, one of `quantised_moe.ROW_ORDERS`.

    Returns:
        [..., hidden] in x's dtype; products are summed up in float32, and what is between them is
        rounded to that dtype.

    Raises:
        UsageError: unknown activation or order.
    """
    return _mixture(
        "int4", x, selected_experts, routing_weights, w3_w1_stacked_weight, w2_stacked_weight,
        w3_w1_weight_scale, w2_weight_scale, w3_w1_weight_zero, w2_weight_zero, w3_w1_weight_whole, w2_weight_whole,
        group, is_gated_mlp, act_fn, w3_w1_stacked_bias, w2_stacked_bias,
        limit, alpha, up_offset, gate_cap, up_cap, order, residual,
    )  # fmt: skip


_SCHEMA = schema_of(torch_int4_moe.__name__)


@register_op(fake_moe, schema=_SCHEMA, inserted=True, experts=True, feed_forward=True)
def torch_mxfp4_moe(*arguments: Any, **keywords: Any) -> Tensor:
    """As `torch_int4_moe`, with floats of four bits (E2M1); scales are uint8: exponents of 2, with
    127 added.
    """
    return _mixture("e2m1", *arguments, **keywords)


@register_op(fake_moe, schema=_SCHEMA, inserted=True, experts=True, feed_forward=True)
def torch_nvfp4_moe(*arguments: Any, **keywords: Any) -> Tensor:
    """As `torch_mxfp4_moe`, with float8_e4m3fn scales and further ones, [experts, rows] float32, in
    `w3_w1_weight_whole` and `w2_weight_whole`.
    """
    return _mixture("e2m1", *arguments, **keywords)

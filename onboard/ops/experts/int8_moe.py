"""Mixtures of experts whose weights are integers of eight bits: the reference, which runs everywhere.

The schemes are those of `onboard.ops.integers.int8_linear`, scales an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onboard.ops.experts.moe import expert_activation, fake_moe, gated, run_experts
from onboard.ops.experts.quantised_moe import gate_and_up
from onboard.ops.integers.int8_linear import torch_int8_linear
from onboard.ops.library import register_op


@dataclass(frozen=True)
class _Product:
    """One of the two products of all experts."""

    codes: Tensor
    bias: Tensor | None
    scale: Tensor
    offset: Tensor | None
    input_scale: Tensor | None
    group: int
    quantize: str

    def of(self, rows: Tensor, expert: int) -> Tensor:
        """Return an expert's product with rows [tokens, inputs], float32."""
        bias, offset, given = (
            None if each is None else each[expert]
            for each in (self.bias, self.offset, self.input_scale)
        )
        codes, scale = self.codes[expert], self.scale[expert]
        return torch_int8_linear(
            rows.float(), codes, bias, scale, offset, given, self.group, self.quantize
        )


@register_op(fake_moe, inserted=True, experts=True, feed_forward=True)
def torch_int8_moe(
    x: Tensor,
    selected_experts: Tensor,
    routing_weights: Tensor,
    w3_w1_stacked_weight: Tensor,
    w2_stacked_weight: Tensor,
    w3_w1_weight_scale: Tensor,
    w2_weight_scale: Tensor,
    w3_w1_weight_offset: Tensor | None = None,
    w2_weight_offset: Tensor | None = None,
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
    quantize: str = "",
    w3_w1_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`torch_moe_fused` whose weights are integers of eight bits, as `torch_int8_linear` has them.

    Args:
        w3_w1_stacked_weight: [experts, 2 * intermediate, hidden] int8 (half unless gated).
        w2_stacked_weight: [experts, hidden, intermediate] int8.
        w3_w1_weight_scale, w2_weight_scale: [experts, rows, ceil(inputs / group)] of floats.
        w3_w1_weight_offset, w2_weight_offset: the same in float32, added to codes times scales.
        group: a multiple of 16, or at least all inputs of both products.
        quantize: how both products' inputs are quantised: "token", "tensor"; "" not at all.
        All others are as for `torch_fp8_moe`.

    Returns:
        [..., hidden] in x's dtype, summed up as `torch_int8_linear` and rounded between products.

    Raises:
        UsageError: unknown activation or order.
    """
    act = expert_activation(act_fn, alpha, gate_cap)
    first = _Product(
        w3_w1_stacked_weight, w3_w1_stacked_bias, w3_w1_weight_scale, w3_w1_weight_offset,
        w3_w1_input_scale, group, quantize,
    )  # fmt: skip
    second = _Product(
        w2_stacked_weight, w2_stacked_bias, w2_weight_scale, w2_weight_offset,
        w2_input_scale, group, quantize,
    )  # fmt: skip

    def expert(index: int, chosen: Tensor) -> Tensor:
        rows = first.of(chosen, index)
        gate, up = gate_and_up(rows, order) if is_gated_mlp else (rows, None)
        return second.of(gated(gate, up, act, limit, up_offset, up_cap).to(x.dtype), index)

    count = len(w2_stacked_weight)
    return run_experts(x, selected_experts, routing_weights, count, expert, residual)

"""Reference of the mixture of experts over stacked weights, which transforms put in."""

from __future__ import annotations

from torch import Tensor

from onboard.ops.experts.moe import fake_moe, torch_moe, with_residual
from onboard.ops.library import register_op


@register_op(fake_moe, inserted=True, experts=True, feed_forward=True)
def torch_moe_fused(
    x: Tensor,
    selected_experts: Tensor,
    routing_weights: Tensor,
    w3_w1_stacked_weight: Tensor,
    w2_stacked_weight: Tensor,
    is_gated_mlp: bool = True,
    act_fn: str = "silu",
    w3_w1_stacked_bias: Tensor | None = None,
    w2_stacked_bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float | None = None,
    up_offset: float = 0.0,
    gate_cap: float | None = None,
    up_cap: float | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`torch_moe` with the weights of all experts in one tensor each.

    Args:
        x: [..., hidden].
        selected_experts: [..., k], the same tokens in the same order; ids outside [0, experts) add
            nothing.
        routing_weights: [..., k].
        w3_w1_stacked_weight: [experts, 2 * intermediate, hidden], up before gate; [experts,
            intermediate, hidden] unless gated.
        w2_stacked_weight: [experts, hidden, intermediate].
        is_gated_mlp, act_fn, limit, alpha, up_offset, gate_cap, up_cap: as for `torch_moe`.
        w3_w1_stacked_bias: [experts, 2 * intermediate] (half as many unless gated) or None.
        w2_stacked_bias: [experts, hidden] or None.
        residual: [..., hidden], added to the output, the same tokens in the same order; or None.

    Returns:
        [..., hidden] in x's dtype.
    """
    w1, w3 = _gate_and_up(w3_w1_stacked_weight, is_gated_mlp)
    b1, b3 = _gate_and_up(w3_w1_stacked_bias, is_gated_mlp)
    b2 = None if w2_stacked_bias is None else list(w2_stacked_bias.unbind())
    lists = (w1 or [], list(w2_stacked_weight.unbind()), w3 or [], is_gated_mlp, act_fn, b1, b2, b3)
    y = torch_moe(
        x, selected_experts, routing_weights, *lists, limit, alpha, up_offset, gate_cap, up_cap
    )
    return with_residual(y, residual)


def _gate_and_up(
    stacked: Tensor | None, gated: bool
) -> tuple[list[Tensor] | None, list[Tensor] | None]:
    if stacked is None:
        return None, None
    if not gated:
        return list(stacked.unbind()), None
    up, gate = stacked.chunk(2, dim=1)
    return list(gate.unbind()), list(up.unbind())

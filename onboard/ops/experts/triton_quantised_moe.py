"""Mixtures of experts with codes: how the kernels are launched."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onboard.ops.experts.moe import fake_moe
from onboard.ops.experts.quantised_moe import torch_fp8_moe
from onboard.ops.experts.triton_moe import Activation, Weight, mixture, tiles_for
from onboard.ops.library import register_op, schema_of
from onboard.ops.triton.launch import last_contiguous, require_device

_SCHEMA = schema_of(torch_fp8_moe.__name__)


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
) -> Tensor:  # fmt: skip
    assert gate_cap is None, "no kernel caps the gate"
    assert up_cap is None, "no kernel caps what is gated"
    require_device(x)
    tokens = last_contiguous(x.reshape(-1, x.shape[-1]))
    if not tokens.numel():
        return fake_moe(x)
    selected = selected_experts.reshape(len(tokens), -1).contiguous()
    routing = routing_weights.reshape(len(tokens), -1).contiguous()
    up = Weight(w3_w1_stacked_weight, w3_w1_stacked_bias, w3_w1_weight_scale, w3_w1_input_scale)
    down = Weight(w2_stacked_weight, w2_stacked_bias, w2_weight_scale, w2_input_scale)
    activation = Activation(is_gated_mlp, act_fn, limit, alpha, up_offset, order)
    tiles = tiles_for(selected.numel(), len(w2_stacked_weight), x.dtype)
    how = "" if len(tokens) == 1 else quantize
    return mixture(tokens, selected, routing, up, down, activation, tiles, how).view(x.shape)

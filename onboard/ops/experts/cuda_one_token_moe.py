"""One token's mixture of experts with weights of four bits or eight on Hopper GPUs: two kernels, the
second of which adds up what the experts bring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.experts.triton_moe import Activation, Weight
from onboard.ops.few_tokens.cuda_few_tokens import (
    BYTES,
    Around,
    Experts,
    Tiles,
    product,
    suits,
    suits_routing,
    suits_weight,
)
from onboard.ops.four_bits.four_bits import RUN, Words
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.ops.triton.launch import power_of_two

MOST_CHOICES = 16
"""Experts of a token: each has a warp of its own in a program of the second kernel."""
_MOST_INPUTS = 384 * RUN
"""Of all experts together, that a program's memory holds."""
_SUMMED = Tiles(8, 2, resident=1)


def takes(
    x: Tensor, selected: Tensor, routing: Tensor, up: Weight, down: Weight, activation: Activation
) -> bool:  # fmt: skip
    """Whether the kernels compute the mixture of tokens x [tokens, hidden]."""
    roles = _roles(activation)
    inner = up.values.shape[1] // roles
    return (
        len(x) == 1
        and selected.numel() <= MOST_CHOICES
        and power_of_two(selected.numel()) * inner <= _MOST_INPUTS
        and suits_routing(routing)
        and _has_words(up, 1 if activation.order == "interleaved" else roles)
        and _has_words(down, 1)
        and suits(x, _words(up))
        and suits_weight(x.device, x.dtype, inner, _words(down))
    )


def mixture(
    x: Tensor, selected: Tensor, routing: Tensor, up: Weight, down: Weight, activation: Activation
) -> Tensor:
    """Return the mixture's output [1, hidden] of x [1, hidden], with experts and weights [1, top]."""
    chosen, experts = selected.reshape(-1).long().contiguous(), len(down.values)
    first = Around(
        gated=activation.gated, activation=activation.name, order=activation.order,
        limit=activation.limit, alpha=activation.alpha, offset=activation.up_offset,
    )  # fmt: skip
    middle = product(x, _words(up), first, experts=Experts(chosen, experts))
    routed = Experts(chosen, experts, routing.reshape(-1).contiguous())
    return product(middle, _words(down), Around(), _SUMMED, routed)


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

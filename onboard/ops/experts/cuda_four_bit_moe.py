"""One token's mixture of experts with four-bit weights on Hopper GPUs: two kernels, the second of
which adds up what the experts bring.
"""

from __future__ import annotations

from torch import Tensor

from onboard.ops.experts.triton_moe import Activation, Weight
from onboard.ops.few_tokens.cuda_few_tokens import (
    Around,
    Experts,
    Tiles,
    product,
    suits,
    suits_routing,
    suits_weight,
)
from onboard.ops.four_bits.four_bits import RUN, Words
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
    inner = up.values.shape[1] // (2 if activation.gated else 1)
    return (
        len(x) == 1
        and selected.numel() <= MOST_CHOICES
        and power_of_two(selected.numel()) * inner <= _MOST_INPUTS
        and suits_routing(routing)
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


def _words(weight: Weight) -> Words:
    assert weight.scale is not None, "words have scales"
    assert weight.levels is not None, "words have levels"
    return Words(
        weight.values, weight.scale, weight.zero, weight.whole, weight.bias, weight.levels, weight.group
    )  # fmt: skip

"""Recognise a delta rule whose gate is open at every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, is_op, nodes_of, replace_with
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

aten, own = torch.ops.aten, torch.ops.onboard
_ZEROS = (aten.zeros, aten.zeros_like, aten.new_zeros)
_ONES = (aten.ones, aten.ones_like, aten.new_ones)
_FILLED = (aten.full, aten.full_like, aten.new_full)
_KEEPING = (
    aten.to,
    aten._to_copy,
    aten.expand,
    aten.view,
    aten.reshape,
    aten.unsqueeze,
    aten.clone,
    aten.neg,
)
"""Operators that leave zeros what they are."""


@register_transform("match_ungated_delta_rule")
class MatchUngatedDeltaRule(GraphTransform[TransformConfig]):
    """Replace `torch_gated_delta_rule` with a gate of ones, whose logarithm is zero, by
    `torch_delta_rule`.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such call."""
        matches = 0
        for node in nodes_of(gm, own.torch_gated_delta_rule):
            values = arguments(node)
            if _is_zero(values.pop("g")):
                replace_with(
                    node, call(gm, node, own.torch_delta_rule.default, *values.values(), like=node)
                )
                matches += 1
        return matches


def _is_zero(node: Any) -> bool:
    """Whether a node's numbers are zeros, by what made them."""
    while is_op(node, *_KEEPING):
        node = node.args[0]
    return (
        is_op(node, *_ZEROS)
        or _is_filled(node, 0)
        or (is_op(node, aten.log) and _is_one(node.args[0]))
    )


def _is_one(node: Any) -> bool:
    return is_op(node, *_ONES) or _is_filled(node, 1)


def _is_filled(node: Any, value: float) -> bool:
    return is_op(node, *_FILLED) and bool(arguments(node)["fill_value"] == value)

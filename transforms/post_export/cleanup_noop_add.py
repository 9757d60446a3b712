"""Remove additions of zero."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import nodes_of, replace_with
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar, operator.add)


@register_transform("cleanup_noop_add")
class CleanupNoopAdd(GraphTransform[TransformConfig]):
    """Replace `x + 0` by `x`, where that changes neither dtype nor shape."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Remove each such addition."""
        matches = 0
        for node in nodes_of(gm, *_ADDITIONS):
            if (same := _other_operand(node)) is not None:
                replace_with(node, same)
                matches += 1
        return matches


def _other_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand that the sum equals, None when the node is more than an addition of a
    literal zero.
    """
    left, right = node.args[:2]
    for value, other in ((left, right), (right, left)):
        if isinstance(value, fx.Node) and _is_zero(other) and _same_type(value, node):
            return value
    return None


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _same_type(value: fx.Node, total: fx.Node) -> bool:
    before, after = value.meta.get("val"), total.meta.get("val")
    return getattr(before, "dtype", type(before)) == getattr(after, "dtype", type(after))

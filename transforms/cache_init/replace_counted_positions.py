"""Let tokens that a model counts from the start of its input be counted from the start of their own
text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import (
    arguments,
    attr_tensor,
    call,
    is_op,
    nodes_of,
    placeholders,
    replace_with,
)
from onboard.graph.pattern_matcher.patterns import CASTS, aten
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_SHAPES = (aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.expand)
_SUMS = (
    aten.add,
    aten.sub,
    aten.rsub,
    aten.mul,
    aten.div,
    aten.floor_divide,
    aten.floor,
    aten.log,
    aten.log1p,
)
_CHOICES = (
    aten.gt,
    aten.ge,
    aten.lt,
    aten.le,
    aten.where,
    aten.clamp,
    aten.clamp_min,
    aten.pow,
    aten.sqrt,
)
_BY_TOKEN = (*_SHAPES, *CASTS, *_SUMS, *_CHOICES)


@register_transform("replace_counted_positions")
class ReplaceCountedPositions(GraphTransform[TransformConfig]):
    """A range over the sequence counts a row of several texts, so positions take its place.

    Only where each token's own number is all that it is used for: numbers that pick rows of the
    input, or that are compared with one another, mean places in the row.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such range by the row of positions."""
        inputs = {str(node.target): node for node in placeholders(gm)}
        length = inputs["input_ids"].meta["val"].shape[1]
        ranges = [
            node
            for node in nodes_of(gm, aten.arange)
            if _counts(node, length) and _by_token(gm, node)
        ]
        for node in ranges:
            replace_with(
                node, _positions(gm, node, inputs["position_ids"], context.factory.first_position)
            )
        return len(ranges)


def _counts(node: fx.Node, length: Any) -> bool:
    """Whether a range has one number for each token: 0, 1, 2 and so on."""
    found = arguments(node)
    end = found["end"].meta["val"] if isinstance(found["end"], fx.Node) else None
    plain = found.get("start", 0) == 0 and found.get("step", 1) == 1
    return (
        plain
        and isinstance(end, torch.SymInt)
        and isinstance(length, torch.SymInt)
        and _equal(end, length)
    )


def _equal(first: torch.SymInt, second: torch.SymInt) -> bool:
    return bool(first.node.expr == second.node.expr)


def _by_token(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the numbers of tokens end up in activations of the same tokens, and nowhere else."""
    pending, numbers = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user in numbers or _is_lookup(gm, user):
                continue
            if not is_op(user, *_BY_TOKEN):
                return False
            if not any(
                each not in numbers and _is_activation(each) for each in user.all_input_nodes
            ):
                numbers.add(user)
                pending.append(user)
    return True


def _is_activation(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(val, torch.Tensor)
        and val.is_floating_point()
        and val.dim() > 1
    )


def _is_lookup(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a table of the model is read at the numbers."""
    return is_op(node, aten.embedding, aten.index) and attr_tensor(gm, node.args[0]) is not None


def _positions(gm: fx.GraphModule, node: fx.Node, position_ids: fx.Node, first: int) -> fx.Node:
    row = call(gm, node, torch.ops.aten.select.int, position_ids, 0, 0, like=node)
    row.meta["val"] = position_ids.meta["val"][0]
    if first:
        row = call(gm, node, torch.ops.aten.sub.Scalar, row, first, like=node)
    if (dtype := node.meta["val"].dtype) != torch.int64:
        row = call(gm, node, torch.ops.aten.to.dtype, row, dtype, like=node)
    return row

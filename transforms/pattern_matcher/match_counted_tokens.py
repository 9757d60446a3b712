"""Recognise positions that a model counts along a mask of ones."""

from __future__ import annotations

from typing import Any

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import call, is_op, nodes_of, placeholders, replace_with
from onboard.graph.pattern_matcher.patterns import aten
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_SAME = (aten.to, aten._to_copy, aten.type_as, aten.clone, aten.contiguous, aten.detach)
"""What makes ones of ones."""


@register_transform("match_counted_tokens")
class MatchCountedTokens(GraphTransform[TransformConfig]):
    """Replace cumsum(ones [batch, sequence], 1) by position_ids + 1.

    Code that counts positions by a mask of padding (OPT, Zhang et al. 2022, arXiv:2205.01068) gets
    ones where there is none: the number of a token in its text, whatever lies beside it in a step.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such sum of a graph that is given positions."""
        given = {node.target: node for node in placeholders(gm)}
        if not {"input_ids", "position_ids"} <= given.keys():
            return 0
        counted = [n for n in nodes_of(gm, aten.cumsum) if _counts(n, given["input_ids"])]
        for node in counted:
            dtype = node.meta["val"].dtype
            numbers = call(gm, node, aten.add.Tensor, given["position_ids"], 1, like=node)
            cast = call(gm, node, aten.to.dtype, numbers, dtype, like=node)
            replace_with(node, cast)
        return len(counted)


def _counts(node: fx.Node, tokens: fx.Node) -> bool:
    """Whether a sum is that of ones over the tokens, one for each."""
    dim: Any = node.args[1]
    shapes = [[*map(str, item.meta["val"].shape)] for item in (node, tokens)]
    return shapes[0] == shapes[1] and dim in (1, -1) and _is_ones(node.args[0])


def _is_ones(node: Any) -> bool:
    """Whether all numbers of a node's tensor are one."""
    if not isinstance(node, fx.Node):
        return bool(node == 1)
    if is_op(node, aten.ones, aten.ones_like, aten.new_ones):
        return True
    if is_op(node, aten.full, aten.full_like):
        return bool(node.args[1] == 1)
    if is_op(node, aten.mul):
        return all(map(_is_ones, node.args))
    if is_op(node, aten.ne):
        return _is_ones(node.args[0]) and bool(node.args[1] == 0)
    return is_op(node, *_SAME) and _is_ones(node.args[0])

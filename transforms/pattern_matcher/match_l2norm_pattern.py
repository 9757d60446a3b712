"""Recognise scaling to length one that is written out."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import call, nodes_of, replace_with
from onboard.graph.pattern_matcher.patterns import Either, Op, Var, aten, find, is_node, is_number
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_X = Var("x", where=is_node)
_SQUARE = Either(Op(aten.pow, _X, 2), Op(aten.mul, _X, _X), Op(aten.square, _X))
_LENGTH = Op(
    aten.add, Op(aten.sum, _SQUARE, [-1], True), Var("eps", where=is_number), commutes=True
)
_PATTERN = Op(aten.mul, _X, Op(aten.rsqrt, _LENGTH), commutes=True)


@register_transform("match_l2norm_pattern")
class MatchL2NormPattern(GraphTransform[TransformConfig]):
    """Replace x * rsqrt(sum(x^2) + eps) by `torch_l2norm`."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such expression."""
        matches = 0
        for node in nodes_of(gm, aten.mul):
            if found := find(_PATTERN, node):
                op = torch.ops.onboard.torch_l2norm.default
                replace_with(node, call(gm, node, op, found["x"], float(found["eps"]), like=node))
                matches += 1
        return matches

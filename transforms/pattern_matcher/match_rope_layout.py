"""Bring all canonical rope ops to one layout."""

from __future__ import annotations

from typing import Literal

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, nodes_of
from onboard.graph.pattern_matcher.patterns import aten
from onboard.graph.pattern_matcher.rope_nodes import COMPLEX, EXPLICIT, INTERLEAVED
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_UNSQUEEZE_DIM = {"bsnd": 2, "bnsd": 1}


class MatchRopeLayoutConfig(TransformConfig):
    """The layout that rope back ends expect."""

    expected_layout: Literal["bsnd", "bnsd"] = "bsnd"
    """bsnd: [batch, sequence, heads, head_dim]; bnsd: heads before sequence."""


@register_transform("match_rope_layout")
class MatchRopeLayout(GraphTransform[MatchRopeLayoutConfig]):
    """Transpose queries and keys around rope ops that have another layout than
    `expected_layout`.
    """

    keeps_shapes = False
    config_class = MatchRopeLayoutConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Rewrite each op with another layout."""
        wanted = _UNSQUEEZE_DIM[self.config.expected_layout]
        ropes = [
            node for node in nodes_of(gm, EXPLICIT, INTERLEAVED, COMPLEX) if _dim(node) != wanted
        ]
        for node in ropes:
            _transpose_around(gm, node, wanted)
        return len(ropes)


def _dim(node: fx.Node) -> int:
    dim = arguments(node)["unsqueeze_dim"]
    assert isinstance(dim, int)
    return dim


def _transpose_around(gm: fx.GraphModule, node: fx.Node, unsqueeze_dim: int) -> None:
    query, key, *tables, _ = arguments(node).values()
    swapped = [
        call(gm, node, aten.transpose.int, tensor, 1, 2, like=node) for tensor in (query, key)
    ]
    node.args, node.kwargs = (*swapped, *tables, unsqueeze_dim), {}
    for part in list(node.users):  # the getitem nodes of its two outputs
        users = list(part.users)
        back = call(gm, part.next, aten.transpose.int, part, 1, 2, like=node)
        for user in users:
            user.replace_input_with(part, back)

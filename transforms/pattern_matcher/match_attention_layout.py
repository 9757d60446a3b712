"""Bring all attention calls to one layout."""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, nodes_of, replace_with
from onboard.graph.pattern_matcher.attention_nodes import ATTENTION, rewrite_attention
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


class MatchAttentionLayoutConfig(TransformConfig):
    """The layout that attention back ends expect."""

    attn_layout: Literal["bsnd", "bnsd"] = "bsnd"
    """bsnd: [batch, sequence, heads, head_dim]; bnsd: heads before sequence."""


@register_transform("match_attention_layout")
class MatchAttentionLayout(GraphTransform[MatchAttentionLayoutConfig]):
    """Transpose inputs and output of `torch_attention` calls that have another layout than
    `attn_layout`.

    The transposes mostly meet their inverse in the graph; `eliminate_redundant_transposes` removes
    such pairs.
    """

    keeps_shapes = False
    config_class = MatchAttentionLayoutConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Rewrite each call with another layout."""
        calls = [
            node
            for node in nodes_of(gm, ATTENTION)
            if arguments(node)["layout"] != self.config.attn_layout
        ]
        for node in calls:
            named = arguments(node)
            inputs = {name: _swap(gm, node, named[name]) for name in ("query", "key", "value")}
            new = rewrite_attention(gm, node, **inputs, layout=self.config.attn_layout)
            replace_with(node, _swap(gm, node, new))
        return len(calls)


def _swap(gm: fx.GraphModule, before: fx.Node, tensor: fx.Node) -> fx.Node:
    return call(gm, before, torch.ops.aten.transpose.int, tensor, 1, 2, like=before)

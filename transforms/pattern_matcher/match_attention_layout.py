"""Bring all attention calls to one layout."""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, nodes_of, replace_with
from onboard.graph.pattern_matcher.attention_nodes import ATTENTION, rewrite_attention
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform


class MatchAttentionLayoutConfig(TransformConfig):
    """The layout that attention back ends expect."""

    attn_layout: Literal["bsnd", "bnsd"] = "bsnd"
    """bsnd: [batch, sequence, heads, head_dim]; bnsd: heads before sequence."""


@register_transform("match_attention_layout")
class MatchAttentionLayout(BaseTransform[MatchAttentionLayoutConfig]):
    """Transpose inputs and output of `torch_attention` calls that have another layout than `attn_layout`.

    The transposes mostly meet their inverse in the graph; `eliminate_redundant_transposes` removes such pairs.
    """

    config_class = MatchAttentionLayoutConfig

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Rewrite each call with another layout."""
        assert isinstance(gm, fx.GraphModule)
        calls = [node for node in nodes_of(gm, ATTENTION) if arguments(node)["layout"] != self.config.attn_layout]
        for node in calls:
            named = arguments(node)
            inputs = {name: _swap(gm, node, named[name]) for name in ("query", "key", "value")}
            new = rewrite_attention(gm, node, **inputs, layout=self.config.attn_layout)
            replace_with(node, _swap(gm, node, new))
        return gm, TransformInfo(num_matches=len(calls), is_clean=not calls, has_valid_shapes=not calls)


def _swap(gm: fx.GraphModule, before: fx.Node, tensor: fx.Node) -> fx.Node:
    return call(gm, before, torch.ops.aten.transpose.int, tensor, 1, 2, like=before)

"""Let attention repeat key and value heads by itself."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, replace_with
from onboard.graph.pattern_matcher.attention_nodes import ATTENTION, rewrite_attention
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_REPEAT = torch.ops.onboard.torch_attention_repeat_kv


@register_transform("match_grouped_attention")
class MatchGroupedAttention(GraphTransform[TransformConfig]):
    """Feed `torch_attention` with the key and value heads from before
    `torch_attention_repeat_kv`.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Rewrite each attention call whose keys and values are repeated equally often."""
        matches = 0
        for node in nodes_of(gm, ATTENTION):
            named = arguments(node)
            key, value = named["key"], named["value"]
            repeated = (
                is_op(key, _REPEAT) and is_op(value, _REPEAT) and key.args[1] == value.args[1]
            )
            if repeated and named["layout"] == "bnsd":
                replace_with(
                    node, rewrite_attention(gm, node, key=key.args[0], value=value.args[0])
                )
                matches += 1
        return matches

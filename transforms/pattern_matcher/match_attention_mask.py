"""Turn masks of canonical attention that are causal, a band or chunks into its own arguments."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.pattern_matcher.attention_nodes import ATTENTION, MaskReader, rewrite_attention
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("match_attention_mask")
class MatchAttentionMask(GraphTransform[TransformConfig]):
    """Attention over pages knows positions only: a table of which keys a query sees has to become a
    bound.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Rewrite each causal call whose mask says no more than positions do."""
        masks = MaskReader(gm)
        matches = 0
        for node in nodes_of(gm, ATTENTION):
            found = arguments(node)
            if found["attn_mask"] is None or not found["is_causal"]:
                continue
            read = masks.read(found["attn_mask"])
            if read["attn_mask"] is not None:
                continue
            if found["chunk_size"] is not None and read["chunk_size"] is not None:
                continue
            windows = [
                window
                for window in (found["sliding_window"], read["sliding_window"])
                if window is not None
            ]
            bounds = {
                "sliding_window": min(windows, default=None),
                "chunk_size": found["chunk_size"] or read["chunk_size"],
            }
            replace_with(node, rewrite_attention(gm, node, attn_mask=None, **bounds))
            matches += 1
        return matches

"""Recognise routers of mixtures of experts, however they are written."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.pattern_matcher.moe_routing import match_routings
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("match_moe_routing_pattern")
class MatchMoeRoutingPattern(GraphTransform[TransformConfig]):
    """Replace what turns a router's logits into experts and weights by `torch_moe_router`, where it
    does the same.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each mixture's router; the others are a fact."""
        matches, others = match_routings(gm)
        if others:
            context.facts.append(
                f"{self.key}: {len(others)} routers of mixtures of experts stay as they are"
            )
        return matches

"""Remove what said how a graph is divided."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.sharding import file_hints
from onboard.graph.sharding.hints import KEY
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


@register_transform("strip_sharding_hints")
class StripShardingHints(GraphTransform[TransformConfig]):
    """Forget the hints: behind this, nothing but the graph itself says what a rank computes."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each call that had a hint."""
        had = [node for node in gm.graph.nodes if node.meta.pop(KEY, None) is not None]
        count = sum(node.op == "call_function" for node in had)
        gm.meta.pop(file_hints.KEY, None)
        return TransformInfo(num_matches=count, is_clean=True, has_valid_shapes=True)

"""Make a graph that of one pipeline stage."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.export.layer_kinds import UnlikeError
from onboard.graph.pipeline_stages.split_stages import split
from onboard.graph.pipeline_stages.whole_caches import whole_caches
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)


@register_transform("split_pipeline_stages")
class SplitPipelineStages(GraphTransform[TransformConfig]):
    """Keep the rank's layers: it loads their weights alone, receives what the rank before it has
    computed, and sends on what the ranks behind it read.

    The first rank has the last stage, so that logits are where tokens are chosen.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each tensor that is received or sent."""
        count = context.runtime.dist_mapping.pp
        if count == 1 or context.ranks.is_alone:
            return skipped("no pipeline stages are asked for")
        if context.left_out is not None:
            raise UnlikeError("pipeline stages have different layers")
        context.whole_caches = whole_caches(gm, context)
        done = split(gm, context.ranks.rank, count)
        return TransformInfo(num_matches=done.received + done.sent, summary=done.summary)

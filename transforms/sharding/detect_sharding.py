"""Find out which share of every layer a rank of several has."""

from __future__ import annotations

from pydantic import Field
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.shapes import propagate_shapes
from onboard.graph.sharding.detect import detect, detect_simple
from onboard.graph.sharding.distribution import DistMapping, distribution
from onboard.graph.sharding.hints import KEY
from onboard.graph.transform import (
    SKIPPED,
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


class DetectShardingConfig(TransformConfig):
    """How layers are divided."""

    simple_shard_only: bool = False
    """Cut the outputs of each linear layer, and gather them at once."""
    dist_mapping: DistMapping = Field(default_factory=DistMapping)
    """Sizes of the groups of ranks."""


@register_transform("detect_sharding")
class DetectSharding(GraphTransform[DetectShardingConfig]):
    """Give the nodes of a graph hints, from the ops that do the work of its layers.

    Attention and recurrences are cut by heads or channels, mixtures by experts or by channels; what
    computes their inputs and what adds up their outputs follows, up to the weights.
    """

    config_class = DetectShardingConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each call that has a hint."""
        if context.ranks.is_alone:
            return SKIPPED
        groups = distribution(context.ranks.world_size, self.config.dist_mapping)
        propagate_shapes(gm, context.device)
        hints = (detect_simple if self.config.simple_shard_only else detect)(gm, groups)
        for node, hint in hints.items():
            node.meta[KEY] = hint
        count = sum(node.op == "call_function" for node in hints)
        return TransformInfo(num_matches=count, is_clean=True, has_valid_shapes=True)

"""Make a graph that of one rank."""

from __future__ import annotations

from typing import Literal

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.sharding.apply import apply_hints
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)


class ApplyShardingHintsConfig(TransformConfig):
    """Which hints are followed, and how sums are made."""

    shard_layers: list[str] | None = None
    """Layer types that are divided; None: all."""
    allreduce_strategy: Literal["AUTO", "NCCL"] = "AUTO"
    """Whose sums over ranks: those of the group's own library, which is NCCL on GPUs."""


@register_transform("apply_sharding_hints")
class ApplyShardingHints(GraphTransform[ApplyShardingHintsConfig]):
    """Follow hints node by node: weights shrink to the rank's share before they are loaded, and
    `dist_all_reduce` and `all_gather` go where shares have to become whole.

    Ops that no rule knows get whole inputs, which is a fact. Heads that the ranks cannot divide are
    refused, with the world sizes that divide them.
    """

    config_class = ApplyShardingHintsConfig
    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each call that was cut."""
        if context.ranks.is_alone or context.runtime.dist_mapping.pp > 1:
            return skipped("the run has one rank, or ranks with whole layers")
        done = apply_hints(gm, context, self.config.shard_layers)
        context.facts.extend(done.facts())
        return TransformInfo(num_matches=done.count, summary=done.summary())

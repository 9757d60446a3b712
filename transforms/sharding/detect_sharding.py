"""Find out which share of every layer a rank of several has."""

from __future__ import annotations

from torch import fx

from onboard.config import DistMapping
from onboard.errors import UsageError
from onboard.graph.context import TransformContext
from onboard.graph.shapes import propagate_shapes
from onboard.graph.sharding.detect import detect, detect_simple
from onboard.graph.sharding.distribution import distribution
from onboard.graph.sharding.file_hints import hints_of_file
from onboard.graph.sharding.hints import KEY
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)


class DetectShardingConfig(TransformConfig):
    """How layers are divided."""

    simple_shard_only: bool = False
    """Cut the outputs of each linear layer, and gather them at once."""
    dist_mapping: DistMapping | None = None
    """Sizes of the groups of ranks; None: those of the run's configuration."""
    use_hints: bool = True
    """Cut linear layers as the model file says; what it does not say is found out."""


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
            return skipped("the run has one rank")
        own, of_run = self.config.dist_mapping, context.runtime.dist_mapping
        if own is not None and own.pp != of_run.pp:
            raise UsageError(
                f"dist_mapping of detect_sharding has pp {own.pp} and that of the run {of_run.pp}",
                hint="Set pp in the run's",
            )
        groups = distribution(context.ranks.world_size, own or of_run)
        if groups.stages > 1:
            return skipped("each rank has whole layers")
        propagate_shapes(gm, context.device)
        said = hints_of_file(gm) if self.config.use_hints else {}
        simple = self.config.simple_shard_only
        hints = detect_simple(gm, groups) if simple else detect(gm, groups, said)
        for node, hint in hints.items():
            node.meta[KEY] = hint
        count = sum(node.op == "call_function" for node in hints)
        summary = f"{len(said)} linear layers as the model file says" if said else ""
        return TransformInfo(
            num_matches=count, is_clean=True, has_valid_shapes=True, summary=summary
        )

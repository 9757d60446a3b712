"""A back end's kernels for mixtures of experts with weights in eight bits and scales of blocks."""

from __future__ import annotations

from torch import fx

from onboard.graph.backends import Backend
from onboard.graph.context import TransformContext
from onboard.graph.post_load_fusion.mixture_kernels import use_kernels
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


class FuseFinegrainedFP8MoeConfig(TransformConfig):
    """Which back end to use."""

    backend: Backend = "auto"


@register_transform("fuse_finegrained_fp8_moe")
class FuseFinegrainedFP8Moe(GraphTransform[FuseFinegrainedFP8MoeConfig]):
    """Point mixtures that `quantize_finegrained_fp8_moe_from_config` put in at the back end's op; their weights
    are stacked already.
    """

    config_class = FuseFinegrainedFP8MoeConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each mixture."""
        count = use_kernels(gm, "finegrained_fp8_moe", self.config.backend, context, self.key)
        return TransformInfo(num_matches=count, is_clean=True, has_valid_shapes=True)

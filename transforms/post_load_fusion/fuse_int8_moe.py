"""A back end's kernels for mixtures of experts with integers of eight bits."""

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


class FuseInt8MoeConfig(TransformConfig):
    """Which back end to use."""

    backend: Backend = "auto"


@register_transform("fuse_int8_moe")
class FuseInt8Moe(GraphTransform[FuseInt8MoeConfig]):
    """Point mixtures that `quantize_int8_moe_from_config` put in at the back end's op; their weights
    are stacked already.
    """

    config_class = FuseInt8MoeConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each mixture."""
        count = use_kernels(gm, "int8_moe", self.config.backend, context, self.key)
        return TransformInfo(num_matches=count, is_clean=True, has_valid_shapes=True)

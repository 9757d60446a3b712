"""A back end's kernels for mixtures of experts with NVFP4."""

from __future__ import annotations

from typing import Literal

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


class FuseNVFP4MoeConfig(TransformConfig):
    """Which back end to use."""

    backend: Backend | Literal["cutlass", "trtllm_gen"] = "cutlass"
    """The libraries "cutlass" and "trtllm_gen" are not used here: the best that there is takes
    their place, which is a fact. What inputs are quantised with, and how a library wants scales and
    routing, has no effect: inputs stay as they are.
    """
    allow_different_input_scales: bool = False
    reverse_interleaved_input_scales: bool = True
    enable_trtllm_gen_internal_routing: bool = True


@register_transform("fuse_nvfp4_moe")
class FuseNVFP4Moe(GraphTransform[FuseNVFP4MoeConfig]):
    """Point mixtures that `quantize_nvfp4_moe_from_config` put in at the back end's op; their weights
    are stacked already.
    """

    config_class = FuseNVFP4MoeConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each mixture."""
        count = use_kernels(gm, "nvfp4_moe", self.config.backend, context, self.key)
        return TransformInfo(num_matches=count, is_clean=True, has_valid_shapes=True)

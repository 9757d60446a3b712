"""Linear layers with NVFP4 weights, by the op that also does what stands around them."""

from __future__ import annotations

from onboard.graph.post_load_fusion.fused_linears import FuseCodedLinear, FuseForeignLinearConfig
from onboard.graph.transform import register_transform


@register_transform("fuse_nvfp4_linear")
class FuseNVFP4Linear(FuseCodedLinear):
    """Replace `torch_nvfp4_linear` by a back end's fused form of it."""

    config_class = FuseForeignLinearConfig
    op = "torch_nvfp4_linear"

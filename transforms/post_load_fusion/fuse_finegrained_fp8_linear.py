"""Linear layers with float8_e4m3fn weights with scales of blocks of 128 x 128, by the op that also
does what stands around them.
"""

from __future__ import annotations

from onboard.graph.post_load_fusion.fused_linears import FuseCodedLinear, FuseForeignLinearConfig
from onboard.graph.transform import register_transform


@register_transform("fuse_finegrained_fp8_linear")
class FuseFinegrainedFP8Linear(FuseCodedLinear):
    """Replace `torch_finegrained_fp8_linear` by a back end's fused form of it."""

    config_class = FuseForeignLinearConfig
    op = "torch_finegrained_fp8_linear"

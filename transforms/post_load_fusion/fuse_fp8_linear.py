"""Linear layers with float8_e4m3fn weights with scales of rows, by the op that also does what stands around them."""

from __future__ import annotations

from onboard.graph.post_load_fusion.fused_linears import FuseCodedLinear
from onboard.graph.transform import register_transform


@register_transform("fuse_fp8_linear")
class FuseFP8Linear(FuseCodedLinear):
    """Replace `torch_fp8_linear` by a back end's fused form of it."""

    op = "torch_fp8_linear"

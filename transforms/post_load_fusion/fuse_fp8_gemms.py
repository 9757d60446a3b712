"""One matrix product for linear layers with codes in float8_e4m3fn that share an input."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.graph.weight_load.gemm_fusion import fuse_sibling_linears


@register_transform("fuse_fp8_gemms")
class FuseFP8Gemms(GraphTransform[TransformConfig]):
    """Join linears with codes in float8_e4m3fn that share an input and have one op and scheme.

    Before loading `fuse_gemms` joins without a copy what only linears read; this is for the rest.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each group of linears that became one."""
        return fuse_sibling_linears(gm, allow_other_users=True, forms=("fused_fp8_linear",))

"""One matrix product for linear layers that share an input (q, k and v; gate and up)."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.graph.weight_load.gemm_fusion import fuse_sibling_linears, fuse_swiglu_gemms


@register_transform("fuse_gemms")
class FuseGemms(GraphTransform[TransformConfig]):
    """Join linears whose input feeds nothing but linears, and gate and up of `torch_swiglu_mlp`.

    Before `load_weights` only the plan changes: each weight is then read straight into its slice of
        the joined one.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each group of linears, or gated feed-forward block, that became one
        product.
        """
        return fuse_sibling_linears(gm, allow_other_users=False) + fuse_swiglu_gemms(gm)

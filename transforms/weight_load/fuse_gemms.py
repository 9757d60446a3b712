"""One matrix product for linear layers that share an input (q, k and v; gate and up)."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from onboard.graph.context import TransformContext
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform
from onboard.graph.weight_load.gemm_fusion import fuse_sibling_linears, fuse_swiglu_gemms


@register_transform("fuse_gemms")
class FuseGemms(BaseTransform[TransformConfig]):
    """Join linears whose input feeds nothing but linears, and gate and up of `torch_swiglu_mlp`.

    Before `load_weights` only the plan changes: each weight is then read straight into its slice of the joined one.
    """

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each group of linears, or gated feed-forward block, that became one product."""
        assert isinstance(gm, GraphModule)
        matches = fuse_sibling_linears(gm, allow_other_users=False) + fuse_swiglu_gemms(gm)
        return gm, TransformInfo(num_matches=matches, is_clean=not matches, has_valid_shapes=True)

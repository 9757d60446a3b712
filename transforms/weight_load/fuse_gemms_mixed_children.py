"""As `fuse_gemms`, for inputs that also feed something else."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.graph.weight_load.gemm_fusion import fuse_sibling_linears


@register_transform("fuse_gemms_mixed_children")
class FuseGemmsMixedChildren(GraphTransform[TransformConfig]):
    """Join linears that share an input even when it has users that are not linear, such as a shape
    access.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each group of linears that became one."""
        return fuse_sibling_linears(gm, allow_other_users=True)

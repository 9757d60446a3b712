"""As `fuse_gemms`, for inputs that also feed something else."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.graph.weight_load.gemm_fusion import fuse_sibling_linears
from onboard.ops.library import op_sources


@register_transform("fuse_gemms_mixed_children")
class FuseGemmsMixedChildren(GraphTransform[TransformConfig]):
    """Join linears that share an input even when it has users that are not linear, such as a shape
    access; those that take codes, too, where they have one op and one scheme.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each group of linears that became one."""
        forms = {source.takes_codes for source in op_sources().values()}
        return fuse_sibling_linears(gm, allow_other_users=True, forms=forms)

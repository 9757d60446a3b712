"""As `fuse_gemms`, for inputs that also feed something else."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from onboard.graph.context import TransformContext
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform
from onboard.graph.weight_load.gemm_fusion import fuse_sibling_linears


@register_transform("fuse_gemms_mixed_children")
class FuseGemmsMixedChildren(BaseTransform[TransformConfig]):
    """Join linears that share an input even when it has users that are not linear, such as a shape access."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each group of linears that became one."""
        assert isinstance(gm, GraphModule)
        matches = fuse_sibling_linears(gm, allow_other_users=True)
        return gm, TransformInfo(num_matches=matches, is_clean=not matches, has_valid_shapes=True)

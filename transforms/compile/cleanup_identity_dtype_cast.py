"""Remove casts to the dtype that a tensor already has."""

from __future__ import annotations

from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.post_load_fusion.casts import remove_identity_casts
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform


@register_transform("cleanup_identity_dtype_cast")
class CleanupIdentityDtypeCast(BaseTransform[TransformConfig]):
    """Remove `aten.to.dtype`, `aten._to_copy` and `prims.convert_element_type` that change nothing observable."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each cast removed."""
        assert isinstance(gm, fx.GraphModule)
        matches = remove_identity_casts(gm)
        return gm, TransformInfo(num_matches=matches, is_clean=not matches, has_valid_shapes=True)

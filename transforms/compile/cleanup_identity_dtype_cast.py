"""Remove casts to the dtype that a tensor already has."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.post_load_fusion.dtype_casts import remove_identity_casts
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("cleanup_identity_dtype_cast")
class CleanupIdentityDtypeCast(GraphTransform[TransformConfig]):
    """Remove `aten.to.dtype`, `aten._to_copy` and `prims.convert_element_type` that change nothing
    observable.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each cast removed."""
        return remove_identity_casts(gm)

"""A residual addition and the RMSNorm after it in one op."""

from __future__ import annotations

from itertools import product

from torch import fx

from onboard.graph.backends import fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import nodes_of
from onboard.graph.post_load_fusion.dtype_casts import remove_identity_casts
from onboard.graph.post_load_fusion.residual_norms import fuse_residual_norm, residual_sum
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.ops import has_triton

_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)


@register_transform("fuse_add_rms_norm")
class FuseAddRMSNorm(GraphTransform[TransformConfig]):
    """Replace `total = x + residual; rmsnorm(total)` by an op that returns both, on the norm's own
    back end.

    The sum may be cast before it is normalised, as in models that keep it in float32.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each pair; it needs the shapes of what is added."""
        casts = remove_identity_casts(gm)  # between a sum and its norm, or its next use
        matches = 0
        for backend, name in product(_BACKENDS, ("rmsnorm", "wide_rmsnorm")):
            for norm in nodes_of(gm, fused_op(backend, name)):
                if (found := residual_sum(norm)) is not None:
                    op = fused_op(backend, f"fused_add_{name}")
                    fuse_residual_norm(gm, norm, found, op, found.total.args)
                    matches += 1
        return TransformInfo(
            num_matches=matches, is_clean=not (matches or casts), has_valid_shapes=True
        )

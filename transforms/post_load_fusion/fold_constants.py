"""What depends on weights alone is computed once."""

from __future__ import annotations

from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.post_load_fusion.constants import fold_constants
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform


@register_transform("fold_constants")
class FoldConstants(BaseTransform[TransformConfig]):
    """Replace calls that read nothing but weights (a decay's -exp, a cast) by parameters with their values."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each value."""
        assert isinstance(gm, fx.GraphModule)
        matches = fold_constants(gm)
        return gm, TransformInfo(num_matches=matches, is_clean=not matches, has_valid_shapes=True)

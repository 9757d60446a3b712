"""What depends on weights alone is computed once."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.post_load_fusion.constants import fold_constants
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("fold_constants")
class FoldConstants(GraphTransform[TransformConfig]):
    """Replace calls that read nothing but weights (a decay's -exp, a cast) by parameters with their
    values.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each value."""
        return fold_constants(gm)

"""No shuffling of a linear layer's outputs in every step."""

from __future__ import annotations

from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.post_load_fusion.output_order import order_outputs
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform


@register_transform("order_linear_outputs")
class OrderLinearOutputs(BaseTransform[TransformConfig]):
    """Shuffle a weight's rows once, so that what reads the layer's outputs finds them side by side."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each linear layer whose outputs were copied."""
        assert isinstance(gm, fx.GraphModule)
        matches = order_outputs(gm)
        return gm, TransformInfo(num_matches=matches, is_clean=not matches, has_valid_shapes=True)

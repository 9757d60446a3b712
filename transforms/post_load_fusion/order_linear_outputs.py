"""No shuffling of a linear layer's outputs in every step."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.post_load_fusion.output_order import order_outputs
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("order_linear_outputs")
class OrderLinearOutputs(GraphTransform[TransformConfig]):
    """Shuffle a weight's rows once, so that what reads the layer's outputs finds them side by
    side.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each linear layer whose outputs were copied."""
        return order_outputs(gm)

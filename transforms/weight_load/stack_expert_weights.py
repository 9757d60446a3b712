"""One tensor for the same weight of all experts of a mixture."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.graph.weight_load.experts.expert_stacks import stack_experts


@register_transform("stack_expert_weights")
class StackExpertWeights(GraphTransform[TransformConfig]):
    """Turn `torch_moe`, which has lists of weights, into `torch_moe_fused`, which has stacks of
    them.

    Before `load_weights` only the plan changes: each expert's weight is then read straight into its
        place.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each mixture."""
        return stack_experts(gm)

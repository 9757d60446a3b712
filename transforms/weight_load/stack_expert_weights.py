"""One tensor for the same weight of all experts of a mixture."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from onboard.graph.context import TransformContext
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform
from onboard.graph.weight_load.expert_stacks import stack_experts


@register_transform("stack_expert_weights")
class StackExpertWeights(BaseTransform[TransformConfig]):
    """Turn `torch_moe`, which has lists of weights, into `torch_moe_fused`, which has stacks of them.

    Before `load_weights` only the plan changes: each expert's weight is then read straight into its place.
    """

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each mixture."""
        assert isinstance(gm, GraphModule)
        matches = stack_experts(gm)
        return gm, TransformInfo(num_matches=matches, is_clean=not matches, has_valid_shapes=True)

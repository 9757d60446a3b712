"""A back end's kernels for mixtures of experts: the grouped products, and the router in front of
them.
"""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import Backend
from onboard.graph.context import TransformContext
from onboard.graph.fx import nodes_of
from onboard.graph.post_load_fusion.mixture_kernels import use_kernels
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.graph.weight_load.experts.expert_stacks import fold_experts, stack_experts


class FuseMoeConfig(TransformConfig):
    """Which back end to use."""

    backend: Backend = "auto"


@register_transform("fuse_moe")
class FuseMoe(GraphTransform[FuseMoeConfig]):
    """Stack the experts that `stack_expert_weights` could not, and point mixtures and routers at
    the back end's ops.
    """

    config_class = FuseMoeConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each mixture whose weights are stacked."""
        changed = stack_experts(gm) + fold_experts(gm)
        if left := nodes_of(gm, torch.ops.onboard.torch_moe):
            fact = f"{self.key}: {len(left)} mixtures of experts stay as they are, their weights cannot be stacked"
            context.facts.append(fact)
        count = use_kernels(gm, "moe_fused", self.config.backend, context, self.key)
        gm.recompile()
        return TransformInfo(num_matches=count, is_clean=not changed, has_valid_shapes=True)

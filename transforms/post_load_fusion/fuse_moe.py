"""A back end's kernels for mixtures of experts: the grouped products, and the router in front of
them.
"""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import Backend, choose_backend, fused_op, kernel_obstacle
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.graph.weight_load.experts.expert_stacks import fold_experts, stack_experts
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS


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
        mixtures = nodes_of(gm, torch.ops.onboard.torch_moe_fused)
        if left := nodes_of(gm, torch.ops.onboard.torch_moe):
            fact = f"{self.key}: {len(left)} mixtures of experts stay as they are, their weights cannot be stacked"
            context.facts.append(fact)
        if mixtures and choose_backend(self.config.backend, context, self.key) == "triton":
            self._use_kernels(gm, mixtures, context)
        gm.recompile()
        return TransformInfo(num_matches=len(mixtures), is_clean=not changed, has_valid_shapes=True)

    def _use_kernels(
        self, gm: fx.GraphModule, mixtures: list[fx.Node], context: TransformContext
    ) -> None:
        obstacles = set()
        for node in mixtures:
            if obstacle := _obstacle(node, context):
                obstacles.add(obstacle)
            else:
                node.target = fused_op("triton", "moe_fused")
        for node in nodes_of(gm, torch.ops.onboard.torch_moe_router):
            node.target = fused_op("triton", "moe_router")
        context.facts.extend(
            f"{self.key}: {obstacle}, torch is used" for obstacle in sorted(obstacles)
        )


def _obstacle(node: fx.Node, context: TransformContext) -> str:
    """Return why no kernel can run a mixture, "" when one can."""
    values = arguments(node)
    if values["gate_cap"] is not None or values["up_cap"] is not None:
        return "an activation with caps has no kernel"
    if values["alpha"] is None and values["act_fn"] not in KERNEL_ACTIVATIONS:
        return f"activation {values['act_fn']} has no kernel"
    return kernel_obstacle(context.dtype)

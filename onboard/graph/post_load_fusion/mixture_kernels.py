"""Mixtures of experts, and the routers in front of them, on a back end's kernels."""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import choose_backend, fused_op, kernel_obstacle
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS


def use_kernels(
    gm: fx.GraphModule, op: str, requested: str, context: TransformContext, asked_by: str
) -> int:
    """Point each `torch_*` mixture of an op, and all routers, at the back end's; return how many
    mixtures there are.

    A mixture that has no kernel stays as it is, which is a fact.
    """
    mixtures = nodes_of(gm, getattr(torch.ops.onboard, f"torch_{op}"))
    if not mixtures or choose_backend(requested, context, asked_by) != "triton":
        return len(mixtures)
    obstacles = set()
    for node in mixtures:
        if obstacle := _obstacle(node, context):
            obstacles.add(obstacle)
        else:
            node.target = fused_op("triton", op)
    for node in nodes_of(gm, torch.ops.onboard.torch_moe_router):
        node.target = fused_op("triton", "moe_router")
    context.facts.extend(f"{asked_by}: {obstacle}, torch is used" for obstacle in sorted(obstacles))
    gm.recompile()
    return len(mixtures)


def _obstacle(node: fx.Node, context: TransformContext) -> str:
    """Return why no kernel can run a mixture, "" when one can."""
    values = arguments(node)
    if values["gate_cap"] is not None or values["up_cap"] is not None:
        return "an activation with caps has no kernel"
    if values["alpha"] is None and values["act_fn"] not in KERNEL_ACTIVATIONS:
        return f"activation {values['act_fn']} has no kernel"
    return kernel_obstacle(context.dtype)

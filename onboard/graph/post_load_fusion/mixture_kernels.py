"""Mixtures of experts, and the routers in front of them, on a back end's kernels."""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import choose_backend, fused_op, kernel_obstacle
from onboard.graph.context import TransformContext
from onboard.graph.fx import ancestors, arguments, hints, is_op, nodes_of, only_user, replace_with
from onboard.graph.post_load_fusion.additions import only_addition
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS

_VIEWS = (torch.ops.aten.view, torch.ops.aten.reshape, torch.ops.aten._unsafe_view)


def use_kernels(
    gm: fx.GraphModule, op: str, requested: str, context: TransformContext, asked_by: str
) -> int:
    """Point each `torch_*` mixture of an op, and all routers, at the back end's; return how many
    mixtures there are.

    A mixture that has a kernel adds what is added to it, too; one that has none stays as it is, which
    is a fact.
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
            _take_in_sum(node)
    for node in nodes_of(gm, torch.ops.onboard.torch_moe_router):
        node.target = fused_op("triton", "moe_router")
    context.facts.extend(f"{asked_by}: {obstacle}, torch is used" for obstacle in sorted(obstacles))
    gm.recompile()
    return len(mixtures)


def _take_in_sum(mixture: fx.Node) -> None:
    """Let a mixture add what is added to it, if nothing else reads the mixture. What is not there before
    it, as what shared experts bring, may be computed beside it.
    """
    last, user = mixture, only_user(mixture)
    while user is not None and is_op(user, *_VIEWS) and _width(user) == _width(mixture):
        last, user = user, only_user(user)
    found = only_addition(last)
    if found is not None and found.other in ancestors([mixture]):
        values, said = arguments(mixture) | {"residual": found.other}, hints(mixture)
        mixture.args, mixture.kwargs = tuple(values.values()), said
        replace_with(found.total, last)


def _width(node: fx.Node) -> int | None:
    """Return the last dimension of a node's value, None where that is not known."""
    value = node.meta.get("val")
    return None if value is None else value.shape[-1]


def _obstacle(node: fx.Node, context: TransformContext) -> str:
    """Return why no kernel can run a mixture, "" when one can."""
    values = arguments(node)
    if values["gate_cap"] is not None or values["up_cap"] is not None:
        return "an activation with caps has no kernel"
    if values["alpha"] is None and values["act_fn"] not in KERNEL_ACTIVATIONS:
        return f"activation {values['act_fn']} has no kernel"
    return kernel_obstacle(context.dtype)

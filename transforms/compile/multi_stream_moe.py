"""Shared experts beside the routed ones, on an auxiliary stream."""

from __future__ import annotations

import torch
from torch import fx

from onboard.experiments.side_branches import is_product, own_part, run_aside
from onboard.graph.context import TransformContext
from onboard.graph.fx import is_op, only_user, op_name
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

aten = torch.ops.aten
_PASSED = (
    aten.view,
    aten.reshape,
    aten.to,
    aten._to_copy,
    aten.clone,
    aten.unsqueeze,
    aten.squeeze,
    aten.mul,
)
"""Calls between the experts' output and the sum with the shared ones'."""


@register_transform("multi_stream_moe")
class MultiStreamMoE(GraphTransform[TransformConfig]):
    """Run what is added to a mixture's output, as far as it is computed from the same input, beside
    the mixture.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each mixture with shared experts."""
        mixtures = [node for node in gm.graph.nodes if _is_mixture(node)]
        return sum(run_aside(gm, branch) for node in mixtures if (branch := _shared_experts(node)))


def _is_mixture(node: fx.Node) -> bool:
    name = op_name(node)
    return "moe" in name and "router" not in name


def _shared_experts(mixture: fx.Node) -> set[fx.Node]:
    """Return the calls that only the shared experts of a mixture need, none when it has no shared
    experts.

    They meet the mixture in whatever first reads its output and something else: a sum, or a call
        that has taken one in.
    """
    routed, total = mixture, only_user(mixture)
    while total is not None and is_op(total, *_PASSED):
        routed, total = total, only_user(total)
    fork = _input(mixture)
    if total is None or fork is None:
        return set()
    others = [source for source in total.all_input_nodes if source is not routed]
    branch = own_part(others, [routed], fork)
    return branch if any(map(is_product, branch)) else set()


def _input(mixture: fx.Node) -> fx.Node | None:
    """Return the hidden states that the mixture reads, before they are reshaped."""
    node = mixture.args[0]
    while isinstance(node, fx.Node) and is_op(node, *_PASSED):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None

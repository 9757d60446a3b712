"""The largest of several fp8 matrix products of one input beside the others, on an auxiliary
stream.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from onboard.experiments.side_branches import run_aside
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, attr_tensor, op_name
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("multi_stream_gemm")
class MultiStreamGemm(GraphTransform[TransformConfig]):
    """Where two or more fp8 linears read one tensor, the one with the most weights runs beside the
    rest.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each product that was moved."""
        return sum(
            run_aside(gm, [max(group, key=lambda node: _size(gm, node))]) for group in _forks(gm)
        )


def _forks(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """Return the fp8 linears that share an input, in graph order."""
    groups: dict[object, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        name = op_name(node)
        if "scaled_mm" in name or ("fp8" in name and "linear" in name):
            groups[node.args[0]].append(node)
    return [group for group in groups.values() if len(group) > 1]


def _size(gm: fx.GraphModule, linear: fx.Node) -> int:
    """Return the number of weights: those of the argument `weight`, or the largest tensor that the
    call reads.
    """
    weight = attr_tensor(gm, arguments(linear).get("weight"))
    tensors = (
        [weight]
        if weight is not None
        else [attr_tensor(gm, source) for source in linear.all_input_nodes]
    )
    return max((tensor.numel() for tensor in tensors if tensor is not None), default=0)

"""A sum over the ranks and the residual addition after it in one op."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.post_load_fusion.additions import only_addition
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_ops = torch.ops.onboard


@register_transform("fuse_allreduce_residual")
class FuseAllreduceResidual(GraphTransform[TransformConfig]):
    """Let a sum over the ranks add what is added to it, if that has its shape and dtype and nothing
    else reads the sum.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each addition."""
        return sum(_fuse(gm, node) for node in nodes_of(gm, _ops.dist_all_reduce))


def _fuse(gm: fx.GraphModule, reduced: fx.Node) -> bool:
    """Take the addition behind a sum over the ranks into it, if there is one."""
    found, values = only_addition(reduced), arguments(reduced)
    if found is None or values["residual"]:
        return False
    summed = values["x"], values["layer_type"], found.other
    new = insert_call(gm, found.total, _ops.dist_all_reduce.default, *summed, like=found.total)
    replace_with(found.total, new)
    gm.graph.erase_node(reduced)
    return True

"""A sum over the ranks and the residual addition after it in one op."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, only_user, replace_with
from onboard.graph.new_nodes import insert_call
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
    total, values = only_user(reduced), arguments(reduced)
    if total is None or not is_op(total, torch.ops.aten.add.Tensor) or values["residual"]:
        return False
    left, right = total.args[:2]
    residual = right if left is reduced else left
    if total.kwargs.get("alpha", 1) != 1 or residual is reduced or not _alike(residual, reduced):
        return False
    summed = values["x"], values["layer_type"], residual
    new = insert_call(gm, total, _ops.dist_all_reduce.default, *summed, like=total)
    replace_with(total, new)
    gm.graph.erase_node(reduced)
    return True


def _alike(residual: object, reduced: fx.Node) -> bool:
    if not isinstance(residual, fx.Node):
        return False
    one, other = residual.meta.get("val"), reduced.meta.get("val")
    if one is None or other is None:
        return False
    return bool(one.shape == other.shape and one.dtype == other.dtype)

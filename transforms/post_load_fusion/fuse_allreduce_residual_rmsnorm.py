"""A sum over the ranks, the residual addition and the RMSNorm after it in one op."""

from __future__ import annotations

from itertools import product

import torch
from torch import fx

from onboard.graph.backends import fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, only_user
from onboard.graph.post_load_fusion.residual_norms import fuse_residual_norm, residual_sum
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.ops import has_triton

_ops = torch.ops.onboard
_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)


@register_transform("fuse_allreduce_residual_rmsnorm")
class FuseAllreduceResidualRMSNorm(GraphTransform[TransformConfig]):
    """Replace a sum over the ranks that is only added to a residual, and the norm of that, by one op
    that returns the norm and the sum, on the norm's own back end.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each norm."""
        return sum(
            _fuse(gm, norm, backend, wide)
            for backend, wide in product(_BACKENDS, (False, True))
            for norm in nodes_of(gm, fused_op(backend, "wide_rmsnorm" if wide else "rmsnorm"))
        )


def _fuse(gm: fx.GraphModule, norm: fx.Node, backend: str, wide: bool) -> bool:
    """Put the op in the place of a norm and what is before it, if that is a sum over the ranks."""
    if (found := residual_sum(norm)) is None:
        return False
    op = fused_op(backend, "fused_allreduce_residual_rmsnorm")
    left, right = found.total.args[:2]
    for reduced, residual in ((left, right), (right, left)):
        if _is_summed_for(reduced, found.total) and isinstance(reduced, fx.Node):
            values = arguments(reduced)
            operands = values["x"], residual
            fuse_residual_norm(gm, norm, found, op, operands, wide, values["layer_type"])
            gm.graph.erase_node(reduced)
            return True
    return False


def _is_summed_for(node: object, total: fx.Node) -> bool:
    """Whether a node is a sum over the ranks that only `total` reads."""
    if not isinstance(node, fx.Node) or not is_op(node, _ops.dist_all_reduce):
        return False
    return only_user(node) is total and arguments(node)["residual"] is None

"""A sum over the ranks, the residual addition and the RMSNorm after it in one op."""

from __future__ import annotations

from itertools import product

import torch
from torch import fx

from onboard.graph.backends import fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, only_user, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.ops import has_triton

_ops = torch.ops.onboard
_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)


@register_transform("fuse_allreduce_residual_rmsnorm")
class FuseAllreduceResidualRMSNorm(GraphTransform[TransformConfig]):
    """Replace a sum over the ranks that only `*_fused_add_rmsnorm` reads, and this, by one op, on
    the norm's own back end; `fuse_add_rms_norm` has found the residual.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each norm."""
        matches = 0
        for backend, wide in product(_BACKENDS, (False, True)):
            pairs = fused_op(backend, "fused_add_wide_rmsnorm" if wide else "fused_add_rmsnorm")
            op = fused_op(backend, "fused_allreduce_residual_rmsnorm")
            for pair in nodes_of(gm, pairs):
                matches += _fuse(gm, pair, op, wide)
        return matches


def _fuse(gm: fx.GraphModule, pair: fx.Node, op: torch._ops.OpOverload, wide: bool) -> bool:
    """Put `op` in the place of a sum over the ranks and the norm behind it, if there is one."""
    values = arguments(pair)
    for total, residual in (("x", "residual"), ("residual", "x")):
        reduced = values[total]
        if is_op(reduced, _ops.dist_all_reduce) and only_user(reduced) is pair:
            found, norm = arguments(reduced), (values["weight"], values["eps"], values["dtype"])
            rest = *norm, wide, found["layer_type"]
            new = insert_call(gm, pair, op, found["x"], values[residual], *rest, like=pair)
            replace_with(pair, new)
            gm.graph.erase_node(reduced)
            return True
    return False

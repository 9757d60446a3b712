"""A back end's kernel for each RMSNorm."""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import Backend, choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, only_user, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.post_load_fusion.constants import fold_constant
from onboard.graph.post_load_fusion.dtype_casts import is_cast
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)

aten = torch.ops.aten


class FuseRMSNormConfig(TransformConfig):
    """Which back ends to use."""

    rmsnorm_backend: Backend = "flashinfer"
    gated_rmsnorm_backend: Literal["triton"] = "triton"
    """Of norms with a gate; where it does not run, they stay as they are, which is a fact."""


@register_transform("fuse_rmsnorm")
class FuseRMSNorm(GraphTransform[FuseRMSNormConfig]):
    """Point every `torch_rmsnorm` at the back end's op; arguments are the same.

    A weight that is computed from a parameter in every step (Gemma's 1 + weight) is computed once.
    """

    config_class = FuseRMSNormConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each norm."""
        norms = nodes_of(gm, torch.ops.onboard.torch_rmsnorm)
        folded = [fold_constant(gm, arguments(node)["weight"]) for node in norms]
        wide = 0
        if norms:
            backend = choose_backend(self.config.rmsnorm_backend, context, self.key)
            wide = sum(_widen(gm, node, backend) for node in norms)
            for node in nodes_of(gm, torch.ops.onboard.torch_rmsnorm):
                node.target = fused_op(backend, "rmsnorm")
            gm.recompile()
        gated = self._fuse_gated(gm, context)
        clean = not (gated or wide or any(folded))
        return TransformInfo(num_matches=len(norms) + gated, is_clean=clean, has_valid_shapes=True)

    def _fuse_gated(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Use the kernel for norms with a gate, a cast behind one included; return how many."""
        norms = nodes_of(gm, torch.ops.onboard.torch_rmsnorm_gated)
        wanted = self.config.gated_rmsnorm_backend
        if not norms or choose_backend(wanted, context, f"{self.key}: norms with a gate") != wanted:
            return 0
        for norm in norms:
            cast = only_user(norm)
            last = cast if is_cast(cast) else norm
            values = [*arguments(norm).values(), last.meta["val"].dtype]
            new = insert_call(
                gm, last, fused_op("triton", "fused_rmsnorm_gated"), *values, like=norm
            )
            replace_with(last, new)
        return len(norms)


def _widen(gm: fx.GraphModule, norm: fx.Node, backend: str) -> bool:
    """Replace a norm between a cast to float32 and a cast back by one that reads and writes 16
    bits.
    """
    values, last = arguments(norm), only_user(norm)
    first = values["input"]
    if last is None or not is_cast(first) or not (is_cast(last) or is_op(last, aten.type_as)):
        return False
    (source,) = first.all_input_nodes
    dtypes = [node.meta["val"].dtype for node in (source, first, norm, last)]
    if dtypes[0] not in (torch.float16, torch.bfloat16) or dtypes[1:] != [
        torch.float32,
        torch.float32,
        dtypes[0],
    ]:
        return False
    op = fused_op(backend, "wide_rmsnorm")
    replace_with(
        last, insert_call(gm, last, op, source, values["weight"], values["eps"], like=norm)
    )
    return True

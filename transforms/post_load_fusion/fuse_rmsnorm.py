"""A back end's kernel for each RMSNorm."""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx, nn

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import Backend, choose_backend, fused_op
from onboard.graph.constants import fold_constant
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform


class FuseRMSNormConfig(TransformConfig):
    """Which back ends to use."""

    rmsnorm_backend: Backend = "flashinfer"
    gated_rmsnorm_backend: Literal["triton"] = "triton"
    """Of norms with a gate, which no canonical op expresses yet."""


@register_transform("fuse_rmsnorm")
class FuseRMSNorm(BaseTransform[FuseRMSNormConfig]):
    """Point every `torch_rmsnorm` at the back end's op; arguments are the same.

    A weight that is computed from a parameter in every step (Gemma's 1 + weight) is computed once.
    """

    config_class = FuseRMSNormConfig

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each norm."""
        assert isinstance(gm, fx.GraphModule)
        norms = nodes_of(gm, torch.ops.onboard.torch_rmsnorm)
        folded = [fold_constant(gm, arguments(node)["weight"]) for node in norms]
        if norms:
            op = fused_op(choose_backend(self.config.rmsnorm_backend, context, self.key), "rmsnorm")
            for node in norms:
                node.target = op
            gm.recompile()
        return gm, TransformInfo(num_matches=len(norms), is_clean=not any(folded), has_valid_shapes=True)

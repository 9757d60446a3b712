"""A back end's kernel for each scaling to length one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import nodes_of
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


class FuseL2NormConfig(TransformConfig):
    """Which back end to use."""

    backend: Literal["auto", "fla", "triton", "torch"] = "fla"


@register_transform("fuse_l2norm")
class FuseL2Norm(GraphTransform[FuseL2NormConfig]):
    """Point every `torch_l2norm` at the back end's op; arguments are the same.

    The queries and keys of a delta rule have theirs inside its own kernels
    (`use_qk_l2norm_in_kernel`).
    """

    config_class = FuseL2NormConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each norm."""
        norms = nodes_of(gm, torch.ops.onboard.torch_l2norm)
        if norms:
            op = fused_op(choose_backend(self.config.backend, context, self.key), "l2norm")
            for node in norms:
                node.target = op
            gm.recompile()
        return TransformInfo(num_matches=len(norms), is_clean=True, has_valid_shapes=True)

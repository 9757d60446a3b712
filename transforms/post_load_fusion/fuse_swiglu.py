"""The gated feed-forward block with gate and up as one matrix, and its activation as one kernel."""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.graph.weight_load.gemm_fusion import fuse_swiglu_gemms


@register_transform("fuse_swiglu")
class FuseSwiGLU(GraphTransform[TransformConfig]):
    """Join what `fuse_gemms` has not joined yet, and use the back end's kernel."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each block."""
        joined = fuse_swiglu_gemms(gm)
        blocks = nodes_of(gm, torch.ops.onboard.torch_fused_swiglu_mlp)
        if choose_backend("auto", context, self.key) == "triton":
            self._use_kernels(blocks, context)
        gm.recompile()
        return TransformInfo(num_matches=len(blocks), is_clean=not joined, has_valid_shapes=True)

    def _use_kernels(self, blocks: list[fx.Node], context: TransformContext) -> None:
        from onboard.ops.linear.activation import KERNEL_ACTIVATIONS

        without = set()
        for node in blocks:
            activation = arguments(node)["activation"]
            if activation in KERNEL_ACTIVATIONS:
                node.target = fused_op("triton", "fused_swiglu_mlp")
            else:
                without.add(activation)
        for activation in sorted(without):
            context.facts.append(
                f"{self.key}: activation {activation} has no kernel, torch is used"
            )

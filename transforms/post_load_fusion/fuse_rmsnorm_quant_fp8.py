"""RMSNorms that quantise for the linear layers behind them."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.backends import choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.post_load_fusion.codes import quantise_in, quantising_readers
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.ops import has_triton

_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)
_NORMS = tuple(getattr(torch.ops.onboard, f"{backend}_rmsnorm") for backend in _BACKENDS)


@register_transform("fuse_rmsnorm_quant_fp8")
class FuseRMSNormQuantFP8(GraphTransform[TransformConfig]):
    """Let an RMSNorm write codes and scales where all that reads it are linear layers that quantise
    it alike, in eight-bit floats; these read the codes. One token's input is quantised, too.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each norm."""
        matches = 0
        for norm in nodes_of(gm, *_NORMS):
            if readers := quantising_readers(gm, norm):
                op = fused_op(choose_backend("auto", context, self.key), "rmsnorm_quant_fp8")
                values = arguments(norm)
                taken = values["input"], values["weight"], values["eps"]
                quantise_in(gm, norm, op, taken, readers)
                matches += 1
        return matches

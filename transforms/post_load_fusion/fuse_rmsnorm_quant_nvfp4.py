"""RMSNorms that write four-bit floats for the linear layers behind them."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.post_load_fusion.nvfp4_readers import NVFP4Readers
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.ops import has_triton

_ops = torch.ops.onboard
_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)
_NORMS = tuple(getattr(_ops, f"{backend}_rmsnorm") for backend in _BACKENDS)


@register_transform("fuse_rmsnorm_quant_nvfp4")
class FuseRMSNormQuantNVFP4(GraphTransform[TransformConfig]):
    """Let an RMSNorm write NVFP4 where all that reads it is linear layers whose checkpoint has one
    scale for their inputs. There are references alone, for the numbers of GPUs that multiply NVFP4.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each norm."""
        readers, matches = NVFP4Readers(gm, context), 0
        for norm in nodes_of(gm, *_NORMS):
            found = arguments(norm)
            values = found["input"], found["weight"], found["eps"]
            matches += readers.quantise(norm, _ops.torch_rmsnorm_quant_nvfp4.default, values)
        return matches

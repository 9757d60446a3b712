"""The gated feed-forward block with NVFP4 weights as one op."""

from __future__ import annotations

import torch

from onboard.graph.post_load_fusion.coded_swiglu import FuseCodedSwiGLU
from onboard.graph.transform import register_transform


@register_transform("fuse_nvfp4_swiglu")
class FuseNVFP4SwiGLU(FuseCodedSwiGLU):
    """Replace a gated feed-forward block whose weights are NVFP4 by one op. Each output has its own
    further scale, so gate and up are joined whatever theirs are.
    """

    linear = torch.ops.onboard.torch_nvfp4_linear
    fused = "fused_nvfp4_swiglu_mlp"
    tensors = ("weight", "weight_scale", "whole")

"""The gated feed-forward block with eight-bit weights as one op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from onboard.graph.fx import is_op
from onboard.graph.post_load_fusion.coded_swiglu import FuseCodedSwiGLU
from onboard.graph.post_load_fusion.codes import is_eight_bit_linear
from onboard.graph.transform import register_transform
from onboard.ops.linear.fp8_linear import BLOCK


@register_transform("fuse_finegrained_fp8_swiglu")
class FuseFinegrainedFP8SwiGLU(FuseCodedSwiGLU):
    """Replace a gated feed-forward block whose weights are eight-bit floats with scales of blocks by
    one op. Gate and up may have scales of rows, as blocks are that are as wide as the weight.
    """

    linear = torch.ops.onboard.torch_finegrained_fp8_linear
    fused = "fused_finegrained_fp8_swiglu_mlp"
    tensors = ("weight", "weight_scale")

    def is_linear(self, node: Any) -> bool:
        """Tell whether a node is a linear layer with eight-bit weights."""
        return is_eight_bit_linear(node)

    def are_alike(self, linears: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether all quantise their inputs in one way, none with the checkpoint's scale."""
        hows = {each["quantize"] for each in linears}
        return len(hows) == 1 and "tensor" not in hows

    def can_be_joined(self, linears: Sequence[fx.Node], rows: int) -> bool:
        """Tell whether no block of scales would have rows of both."""
        return rows % BLOCK == 0 or not is_op(linears[0], self.linear)

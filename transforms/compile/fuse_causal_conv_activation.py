"""The activation after a cached causal convolution becomes a part of it."""

from __future__ import annotations

import torch
from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, only_user, op_name, replace_with
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform

aten = torch.ops.aten
_ACTIVATIONS = {
    aten.silu.default: "silu",
    aten.relu.default: "relu",
}
"""What the back ends' kernels know, by the operator that export leaves."""


@register_transform("fuse_causal_conv_activation")
class FuseCausalConvActivation(BaseTransform[TransformConfig]):
    """Let a cached convolution whose output only an activation reads compute that, too: one pass over memory less."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each activation that was moved."""
        assert isinstance(gm, fx.GraphModule)
        convolutions = [node for node in gm.graph.nodes if op_name(node).endswith("_cached_causal_conv1d")]
        matches = sum(_fuse(node) for node in convolutions)
        return gm, TransformInfo(num_matches=matches, is_clean=not matches, has_valid_shapes=True)


def _fuse(convolution: fx.Node) -> bool:
    activation = only_user(convolution)
    found = arguments(convolution)
    if activation is None or found["activation"] is not None or activation.target not in _ACTIVATIONS:
        return False
    found["activation"] = _ACTIVATIONS[activation.target]
    convolution.args, convolution.kwargs = tuple(found.values()), {}
    replace_with(activation, convolution)
    return True

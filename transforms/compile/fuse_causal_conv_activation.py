"""The activation after a cached causal convolution becomes a part of it."""

from __future__ import annotations

import torch
from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, only_user, replace_with
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform
from onboard.ops.library import cached_forms

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
        forms = cached_forms("torch_causal_conv1d").values()
        convolutions = nodes_of(gm, *(getattr(torch.ops.onboard, name) for name in forms))
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

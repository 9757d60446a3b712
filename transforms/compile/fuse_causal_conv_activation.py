"""The activation after a cached causal convolution becomes a part of it."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, only_user, replace_with
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.ops.library import cached_forms

aten = torch.ops.aten
_ACTIVATIONS = {
    aten.silu.default: "silu",
    aten.relu.default: "relu",
}
"""What the back ends' kernels know, by the operator that export leaves."""


@register_transform("fuse_causal_conv_activation")
class FuseCausalConvActivation(GraphTransform[TransformConfig]):
    """Let a cached convolution whose output only an activation reads compute that, too: one pass
    over memory less.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each activation that was moved."""
        forms = cached_forms("torch_causal_conv1d").values()
        convolutions = nodes_of(gm, *(getattr(torch.ops.onboard, name) for name in forms))
        return sum(_fuse(node) for node in convolutions)


def _fuse(convolution: fx.Node) -> bool:
    activation = only_user(convolution)
    found = arguments(convolution)
    if (
        activation is None
        or found["activation"] is not None
        or activation.target not in _ACTIVATIONS
    ):
        return False
    found["activation"] = _ACTIVATIONS[activation.target]
    convolution.args, convolution.kwargs = tuple(found.values()), {}
    replace_with(activation, convolution)
    return True

"""Swap every short causal convolution for one that keeps each sequence's last inputs."""

from __future__ import annotations

from torch import fx

from onboard.graph.cache_init.descriptor import StateDescriptor, refuse_unless, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS


class CausalConvDescriptor(StateDescriptor):
    """A short convolution along the sequence."""

    def check(self, node: fx.Node) -> None:
        """Refuse convolutions that skip tokens or pad with anything else than zeros."""
        refuse_unless(node, stride=1, padding_mode="zeros")

    def kernel_obstacle(self, node: fx.Node) -> str:
        """Kernels serve depthwise convolutions and the activations that are written out in them."""
        channels, found = tensor_argument(node, 0).meta["val"], arguments(node)
        if found["groups"] != channels.shape[-1] or len(tensor_argument(node, 1).meta["val"]) != channels.shape[-1]:
            return "the convolution mixes channels"
        if found["activation"] not in (None, *KERNEL_ACTIVATIONS):
            return f"its kernel has no activation {found['activation']!r}"
        return super().kernel_obstacle(node)


@register_transform("insert_cached_causal_conv")
class InsertCachedCausalConv(InsertCached):
    """The last inputs of each sequence in a slot of the cache."""

    descriptor = CausalConvDescriptor("torch_causal_conv1d")

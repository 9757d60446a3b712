"""Swap every short causal convolution for one that keeps each sequence's last inputs."""

from __future__ import annotations

from typing import Any

from torch import fx

from onboard.graph.cache_init.descriptor import StateDescriptor, refuse_unless, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform
from onboard.ops.convolution.causal_conv import groups_of
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS


class CausalConvDescriptor(StateDescriptor):
    """A short convolution along the sequence."""

    def check(self, node: fx.Node) -> None:
        """Refuse convolutions that skip tokens or pad with anything else than zeros."""
        refuse_unless(node, stride=1, padding_mode="zeros")

    def kernel_obstacle(self, node: fx.Node) -> str:
        """Kernels serve depthwise convolutions and the activations that are written out in them."""
        channels, weight = (tensor_argument(node, position).meta["val"] for position in (0, 1))
        found = arguments(node)
        if groups_of(channels, weight) != channels.shape[-1] or len(weight) != channels.shape[-1]:
            return "the convolution mixes channels"
        if found["activation"] not in (None, *KERNEL_ACTIVATIONS):
            return f"its kernel has no activation {found['activation']!r}"
        return super().kernel_obstacle(node)

    def constants(self, node: fx.Node) -> tuple[Any, ...]:
        """Return dilation, groups and activation; the source may leave the groups to the weight."""
        channels, weight = (tensor_argument(node, position).meta["val"] for position in (0, 1))
        found = arguments(node)
        return found["dilation"], int(groups_of(channels, weight)), found["activation"]


@register_transform("insert_cached_causal_conv")
class InsertCachedCausalConv(InsertCached):
    """The last inputs of each sequence in a slot of the cache."""

    descriptor = CausalConvDescriptor("torch_causal_conv1d")

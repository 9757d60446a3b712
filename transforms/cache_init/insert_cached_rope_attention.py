"""Swap every attention that rotates by itself for a back end's over the paged cache."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.cache_init.descriptor import AttentionDescriptor, KeptTokens
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform
from onboard.ops.attention.rope_attention import apart


class RopeAttentionDescriptor(AttentionDescriptor):
    """Attention behind a rotation of its own; keys are kept rotated."""

    source = torch.ops.onboard.torch_rope_attention

    def check(self, node: fx.Node) -> None:
        """Nothing is left to refuse: it is causal, and without a mask."""

    def prepare(self, gm: fx.GraphModule, node: fx.Node) -> fx.Node:
        """Return the node: its layout is bsnd."""
        return node

    def kept(self, node: fx.Node) -> tuple[KeptTokens, KeptTokens]:
        """Return keys and values as they are behind the product that may hold both."""
        found = arguments(node)
        query, key, value = (found[name].meta["val"] for name in ("query", "key", "value"))
        _, key, value = apart(query, key, value, found["heads"])
        return (
            KeptTokens(key.shape[2], key.shape[3], key.dtype),
            KeptTokens(value.shape[2], value.shape[3], value.dtype),
        )


@register_transform("insert_cached_rope_attention")
class InsertCachedRopeAttention(InsertCached):
    """Rotated keys and values of each token in pages of the cache."""

    descriptor = RopeAttentionDescriptor()

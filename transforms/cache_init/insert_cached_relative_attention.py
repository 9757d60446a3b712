"""Swap every attention with a bias by distance for one over paged keys and values."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform


class RelativeAttentionDescriptor(CachedOpDescriptor):
    """Attention to which each query brings a bias for each distance."""

    source = torch.ops.onboard.torch_relative_attention

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return a cache for the keys and one for the values."""
        window = arguments(node)["sliding_window"]
        shapes = {
            "k_cache": tensor_argument(node, 1).meta["val"],
            "v_cache": tensor_argument(node, 2).meta["val"],
        }
        return {
            name: KVPagedResource(
                int(val.shape[2]), int(val.shape[3]), dtype or val.dtype, page_size, window
            )
            for name, val in shapes.items()
        }


@register_transform("insert_cached_relative_attention")
class InsertCachedRelativeAttention(InsertCached):
    """Keys and values of each token in pages of the cache; what a query brings is not kept."""

    descriptor = RelativeAttentionDescriptor()

"""Swap every gated pooling of blocks of tokens for one over a paged cache of the tokens that blocks
are made of.
"""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform
from onboard.ops.sparse.gated_pool import span


class GatedPoolDescriptor(CachedOpDescriptor):
    """An entry of each block of tokens, a mean that gates weigh."""

    source = torch.ops.onboard.torch_gated_pool

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return caches for values and gates, each in its own dtype, of which an entry's own tokens
        are read again.
        """
        values, gates, bias = (tensor_argument(node, index).meta["val"] for index in range(3))
        seen = span(bias, arguments(node)["overlap"])
        return {
            name: KVPagedResource(1, int(each.shape[2]), each.dtype, page_size, seen)
            for name, each in (("value_cache", values), ("gate_cache", gates))
        }


@register_transform("insert_cached_gated_pool")
class InsertCachedGatedPool(InsertCached):
    """Values and gates of the tokens of unfinished blocks in pages of the cache."""

    descriptor = GatedPoolDescriptor()

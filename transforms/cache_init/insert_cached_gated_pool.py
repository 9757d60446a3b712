"""Swap every gated pooling of blocks of tokens for one over a paged cache of the tokens that blocks are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onboard.cache.batch import METADATA_NAMES
from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform
from onboard.ops.sparse.gated_pool import span


class GatedPoolDescriptor(CachedOpDescriptor):
    """An entry of each block of tokens, a mean that gates weigh."""

    source = torch.ops.onboard.torch_gated_pool
    num_tensors = 3
    metadata = METADATA_NAMES

    def resources(self, node: fx.Node, page_size: int, dtype: torch.dtype | None) -> dict[str, CacheResource]:
        """Return caches for values and gates, each in its own dtype, of which an entry's own tokens are read again."""
        values, gates, bias = (tensor_argument(node, index).meta["val"] for index in range(3))
        seen = span(bias, arguments(node)["overlap"])
        return {
            name: KVPagedResource(1, int(each.shape[2]), each.dtype, page_size, seen)
            for name, each in (("value_cache", values), ("gate_cache", gates))
        }

    def constants(self, node: fx.Node) -> tuple[Any, ...]:
        """Return overlap."""
        return (arguments(node)["overlap"],)


@register_transform("insert_cached_gated_pool")
class InsertCachedGatedPool(InsertCached):
    """Values and gates of the tokens of unfinished blocks in pages of the cache."""

    descriptor = GatedPoolDescriptor()

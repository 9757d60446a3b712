"""Swap every attention to chosen keys for one over paged keys and values."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


class SparseAttentionDescriptor(CachedOpDescriptor):
    """Attention to the keys that were chosen for each query."""

    source = torch.ops.onboard.torch_sparse_attention

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return caches for keys and values."""
        key, value = (tensor_argument(node, index).meta["val"] for index in (1, 2))
        heads = int(key.shape[2])
        return {
            "k_cache": KVPagedResource(heads, int(key.shape[3]), dtype or key.dtype, page_size),
            "v_cache": KVPagedResource(heads, int(value.shape[3]), dtype or value.dtype, page_size),
        }


@register_transform("insert_cached_sparse_attention")
class InsertCachedSparseAttention(InsertCached):
    """Keys and values of each token in pages of the cache, of which attention reads the chosen
    ones.
    """

    descriptor = SparseAttentionDescriptor()

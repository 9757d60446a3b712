"""Swap every latent attention to chosen keys for one over a paged cache of latents."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform


class SparseMLADescriptor(CachedOpDescriptor):
    """Latent attention to the keys that an indexer chose, or to those near the query."""

    source = torch.ops.onboard.torch_sparse_mla

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return one cache: the latent and the rotated key of a token side by side."""
        latent, rotated = (tensor_argument(node, index).meta["val"] for index in (2, 3))
        width, window = latent.shape[-1] + rotated.shape[-1], arguments(node)["sliding_window"]
        return {"mla_cache": KVPagedResource(1, width, dtype or latent.dtype, page_size, window)}


@register_transform("insert_cached_sparse_mla_attention")
class InsertCachedSparseMLAAttention(InsertCached):
    """Latents of each token in pages of the cache, of which attention reads the chosen ones."""

    descriptor = SparseMLADescriptor()

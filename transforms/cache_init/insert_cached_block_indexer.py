"""Swap every choice of blocks of keys for one over a paged cache of the blocks' keys."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform
from onboard.ops.sparse.indexer import tie_note


class BlockIndexerDescriptor(CachedOpDescriptor):
    """The choice of whole blocks of keys for sparse attention, with a small key of its own for each
    block.
    """

    source = torch.ops.onboard.torch_block_indexer

    def note(self, node: fx.Node) -> str:
        """Scores of few heads tie, and then transformers' choice is not one to compare with."""
        heads, dim = tensor_argument(node, 0).meta["val"].shape[2:]
        return tie_note(int(heads), int(dim), int(arguments(node)["top_k"]))

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return one cache: a token's key, in its own dtype, since what is chosen hangs on small
        differences.
        """
        key = tensor_argument(node, 1).meta["val"]
        return {"index_cache": KVPagedResource(1, key.shape[-1], key.dtype, page_size)}


@register_transform("insert_cached_block_indexer")
class InsertCachedBlockIndexer(InsertCached):
    """The indexer's key of each token in pages of the cache."""

    descriptor = BlockIndexerDescriptor()

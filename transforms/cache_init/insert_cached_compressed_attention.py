"""Swap every attention to a window and to entries of blocks for one over pages of tokens and pages
of entries.
"""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform


class CompressedAttentionDescriptor(CachedOpDescriptor):
    """Attention to the tokens of a window and to entries that stand for blocks of tokens."""

    source = torch.ops.onboard.torch_compressed_attention
    has_second_table = True

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return one cache for the window's tokens and one for the entries, of which a page has
        few.
        """
        kv, entries = (tensor_argument(node, index).meta["val"] for index in (1, 2))
        found = arguments(node)
        window, block = found["sliding_window"], found["block_size"]
        return {
            "kv_cache": KVPagedResource(1, int(kv.shape[3]), dtype or kv.dtype, page_size, window),
            "entry_cache": KVPagedResource(
                1, int(entries.shape[2]), dtype or entries.dtype, page_size, None, block
            ),
        }


@register_transform("insert_cached_compressed_attention")
class InsertCachedCompressedAttention(InsertCached):
    """Tokens and entries in pages of the cache, each with a numbering of its own."""

    descriptor = CompressedAttentionDescriptor()

"""Swap every attention to the keys of the largest bias for one over paged keys, values and
biases.
"""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.fx import arguments
from onboard.graph.transform import register_transform


class DynamicMaskAttentionDescriptor(CachedOpDescriptor):
    """Attention to the keys that have the largest bias of their own."""

    source = torch.ops.onboard.torch_dynamic_mask_attention

    def note(self, node: fx.Node) -> str:
        """Repeated tokens may have equal biases, and then transformers' choice is not one to
        compare with.
        """
        keep = arguments(node)["keep"]
        return (
            f"repeated tokens may tie where a query keeps {keep} keys of the largest bias: transformers' own prefill "
            "and decode choose differently among equals, here the first of them count"
        )

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return caches for keys and values, and one for the biases in their own dtype: small
        differences decide.
        """
        key, value, bias = (tensor_argument(node, index).meta["val"] for index in (1, 2, 3))
        heads, window = int(key.shape[2]), arguments(node)["sliding_window"]
        return {
            "k_cache": KVPagedResource(
                heads, int(key.shape[3]), dtype or key.dtype, page_size, window
            ),
            "v_cache": KVPagedResource(
                heads, int(value.shape[3]), dtype or value.dtype, page_size, window
            ),
            "bias_cache": KVPagedResource(int(bias.shape[2]), 1, bias.dtype, page_size, window),
        }


@register_transform("insert_cached_dynamic_mask_attention")
class InsertCachedDynamicMaskAttention(InsertCached):
    """Keys, values and biases of each token in pages of the cache."""

    descriptor = DynamicMaskAttentionDescriptor()

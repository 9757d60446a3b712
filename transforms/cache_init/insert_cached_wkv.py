"""Swap every WKV for one that keeps each sequence's sums."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, StateResource
from onboard.graph.cache_init.descriptor import StateDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform
from onboard.ops.ssm.ssm import wide_dtype


class WKVDescriptor(StateDescriptor):
    """The average of values with weights that fade."""

    source = torch.ops.onboard.torch_wkv
    num_tensors = 4

    def resources(self, node: fx.Node, page_size: int, dtype: torch.dtype | None) -> dict[str, CacheResource]:
        """Return one cache of states, in the recurrence's own dtype."""
        key = tensor_argument(node, 0).meta["val"]
        return {"wkv_cache": StateResource((3, int(key.shape[2])), wide_dtype(key))}


@register_transform("insert_cached_wkv")
class InsertCachedWKV(InsertCached):
    """The sums of each sequence in a slot of the cache."""

    descriptor = WKVDescriptor()

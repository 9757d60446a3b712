"""Swap every token shift for one that keeps each sequence's last token."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, StateResource
from onboard.graph.cache_init.descriptor import StateDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


class TokenShiftDescriptor(StateDescriptor):
    """Every token sees the one before it."""

    source = torch.ops.onboard.torch_token_shift
    num_tensors = 1

    def resources(self, node: fx.Node, page_size: int, dtype: torch.dtype | None) -> dict[str, CacheResource]:
        """Return one cache of tokens, in their own dtype."""
        x = tensor_argument(node, 0).meta["val"]
        return {"shift_cache": StateResource((int(x.shape[2]),), x.dtype)}


@register_transform("insert_cached_token_shift")
class InsertCachedTokenShift(InsertCached):
    """The last token of each sequence in a slot of the cache."""

    descriptor = TokenShiftDescriptor()

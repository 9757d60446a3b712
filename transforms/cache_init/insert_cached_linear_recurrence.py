"""Swap every diagonal linear recurrence for one that keeps each sequence's state."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, StateResource
from onboard.graph.cache_init.descriptor import StateDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform
from onboard.ops.ssm.ssm import wide_dtype


class LinearRecurrenceDescriptor(StateDescriptor):
    """The recurrence of RG-LRU."""

    source = torch.ops.onboard.torch_linear_recurrence
    num_tensors = 2

    def resources(self, node: fx.Node, page_size: int, dtype: torch.dtype | None) -> dict[str, CacheResource]:
        """Return one cache of states, in the recurrence's own dtype."""
        x = tensor_argument(node, 0).meta["val"]
        return {"recurrence_cache": StateResource((int(x.shape[2]),), wide_dtype(x))}


@register_transform("insert_cached_linear_recurrence")
class InsertCachedLinearRecurrence(InsertCached):
    """The state of each sequence in a slot of the cache."""

    descriptor = LinearRecurrenceDescriptor()

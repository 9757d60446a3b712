"""Swap every delta rule without decay for one that keeps each sequence's state."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, StateResource
from onboard.graph.cache_init.descriptor import StateDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform
from onboard.ops.ssm.ssm import wide_dtype


class DeltaRuleDescriptor(StateDescriptor):
    """Linear attention with correction."""

    source = torch.ops.onboard.torch_delta_rule
    num_tensors = 4

    def resources(self, node: fx.Node, page_size: int, dtype: torch.dtype | None) -> dict[str, CacheResource]:
        """Return one cache of states, in the recurrence's own dtype."""
        key, value = (tensor_argument(node, index).meta["val"] for index in (1, 2))
        shape = (int(value.shape[2]), int(key.shape[3]), int(value.shape[3]))
        return {"delta_cache": StateResource(shape, wide_dtype(value))}


@register_transform("insert_cached_delta_rule")
class InsertCachedDeltaRule(InsertCached):
    """The state of each sequence in a slot of the cache."""

    descriptor = DeltaRuleDescriptor()

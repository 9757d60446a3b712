"""Swap every delta rule that takes away by keys of its own for one that keeps each sequence's state."""

from __future__ import annotations

from onboard.graph.cache_init.descriptor import StateDescriptor
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


@register_transform("insert_cached_dplr_delta_rule")
class InsertCachedDPLRDeltaRule(InsertCached):
    """The state of each sequence in a slot of the cache."""

    descriptor = StateDescriptor("torch_dplr_delta_rule")

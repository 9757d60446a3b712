"""Swap every delta rule without decay for one that keeps each sequence's state."""

from __future__ import annotations

from onboard.graph.cache_init.descriptor import StateDescriptor
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


@register_transform("insert_cached_delta_rule")
class InsertCachedDeltaRule(InsertCached):
    """The state of each sequence in a slot of the cache."""

    descriptor = StateDescriptor("torch_delta_rule")

"""Swap every gated linear attention for one that keeps each sequence's state."""

from __future__ import annotations

from onboard.graph.cache_init.descriptor import StateDescriptor
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


@register_transform("insert_cached_gated_linear_attention")
class InsertCachedGatedLinearAttention(InsertCached):
    """The state of each sequence in a slot of the cache."""

    descriptor = StateDescriptor("torch_gated_linear_attention")

"""Swap every canonical attention for a back end's attention over the paged cache."""

from __future__ import annotations

from onboard.graph.cache_init.descriptor import AttentionDescriptor
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


@register_transform("insert_cached_attention")
class InsertCachedAttention(InsertCached):
    """Keys and values of each token in pages of the cache."""

    descriptor = AttentionDescriptor()

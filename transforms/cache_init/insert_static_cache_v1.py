"""Keys and values as inputs and outputs of the graph, joined at once."""

from __future__ import annotations

from onboard.graph.cache_init.static_cache import InsertStaticCache
from onboard.graph.transform import register_transform


@register_transform("insert_static_cache_v1")
class InsertStaticCacheV1(InsertStaticCache):
    """Attention reads a slice of the whole new cache."""

    form = "static_v1"

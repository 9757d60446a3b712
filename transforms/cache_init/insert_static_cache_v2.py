"""Keys and values as inputs and outputs of the graph, joined with fewer slices."""

from __future__ import annotations

from onboard.graph.cache_init.static_cache import InsertStaticCache
from onboard.graph.transform import register_transform


@register_transform("insert_static_cache_v2")
class InsertStaticCacheV2(InsertStaticCache):
    """Attention reads what was cached and the new tokens, joined; the rest of the cache joins them after."""

    form = "static_v2"

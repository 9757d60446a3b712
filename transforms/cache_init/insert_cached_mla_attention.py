"""Swap every multi-head latent attention for one over a paged cache of latents."""

from __future__ import annotations

from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.cache_init.latents import MLADescriptor
from onboard.graph.transform import register_transform


@register_transform("insert_cached_mla_attention")
class InsertCachedMLAAttention(InsertCached):
    """Latents of each token in pages of the cache."""

    descriptor = MLADescriptor()

"""Allocate every registered cache, small: enough for one sequence in one step."""

from __future__ import annotations

from torch import nn

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.graph.cache_init.interface import fit_batch
from onboard.graph.context import TransformContext
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)


@register_transform("initialize_cache")
class InitializeCache(BaseTransform[TransformConfig]):
    """Gives `resize_kv_cache` something to measure with; that one sets the final size."""

    acts = True

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Allocate the caches, for fewer sequences where many need too much; the graph stays as it
        is.
        """
        cache: CachedSequenceInterface | None = context.cache
        if cache is None:
            return gm, skipped("the graph has nothing to cache")
        fit_batch(context)
        info = cache.info
        cache.allocate(1 + min(info.pages_per_sequence, -(-info.max_num_tokens // info.page_size)))
        return gm, TransformInfo(
            num_matches=len(cache.caches), is_clean=True, has_valid_shapes=True
        )

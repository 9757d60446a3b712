"""Put a back end's attention over the paged cache in place of the attention of transformers' eager
model.
"""

from __future__ import annotations

from torch import nn

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.errors import OnboardError
from onboard.graph.backends import cached_backend
from onboard.graph.cache_init.cached_hf import CachedTransformersModel
from onboard.graph.cache_init.descriptor import AttentionDescriptor
from onboard.graph.cache_init.interface import cache_dtype, make_interface
from onboard.graph.context import TransformContext
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


class HFReplaceCachedAttnConfig(TransformConfig):
    """Fields of `transformers_replace_cached_attn`."""

    backend: str | None = None
    """The attention back end; None, or another library's that is not here: that of the run."""


@register_transform("transformers_replace_cached_attn")
class HFReplaceCachedAttn(BaseTransform[HFReplaceCachedAttnConfig]):
    """From here on the model takes one flat row of tokens, the sequence metadata and the caches.

    Layers may differ in every way: each call that `detect_hf_attn_layers` found has caches of its
        own.
    """

    config_class = HFReplaceCachedAttnConfig

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Register the caches with `context.cache` and wrap the model."""
        if not context.attention:
            raise OnboardError(
                "no attention layers are known", hint="Leave detect_hf_attn_layers enabled"
            )
        if context.cache is None:
            context.cache = make_interface(context)
        attention = AttentionDescriptor()
        op = attention.cached_op(
            cached_backend(self.config.backend, attention.cached_names, context, self.key)
        )
        names = [_add_caches(index, context) for index in range(len(context.attention))]
        model = CachedTransformersModel(gm, context.attention, names, op)
        return model, TransformInfo(num_matches=len(names), is_clean=True, has_valid_shapes=True)


def _add_caches(index: int, context: TransformContext) -> list[str]:
    """Register the two caches of a layer; return the names of what its attention takes."""
    cache = context.cache
    assert isinstance(cache, CachedSequenceInterface)
    resources = context.attention[index].resources(cache.info.page_size, cache_dtype(context))
    for name, resource in resources.items():
        cache.add_cache(f"{name}_{index}", resource)
    metadata = cache.metadata_names(AttentionDescriptor().metadata, resources["k_cache"])
    return [*metadata, *(f"{name}_{index}" for name in resources)]

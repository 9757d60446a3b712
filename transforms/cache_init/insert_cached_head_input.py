"""Keep what the language-model head reads, where `detect_head_input_for_capture` has marked it."""

from __future__ import annotations

from onboard.graph.cache_init.hidden_descriptor import HiddenStatesDescriptor
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


@register_transform("insert_cached_head_input")
class InsertCachedHeadInput(InsertCached):
    """The hidden state of each token in pages of the cache."""

    descriptor = HiddenStatesDescriptor("torch_head_input")

"""Keep the hidden states behind the layers that `detect_hidden_states_for_capture` has marked."""

from __future__ import annotations

from onboard.graph.cache_init.hidden_descriptor import HiddenStatesDescriptor
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


@register_transform("insert_cached_residual_add")
class InsertCachedResidualAdd(InsertCached):
    """The hidden state of each token in pages of the cache."""

    descriptor = HiddenStatesDescriptor("torch_residual_add")

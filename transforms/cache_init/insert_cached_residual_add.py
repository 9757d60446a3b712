"""Keep the hidden states behind the layers that `detect_hidden_states_for_capture` has marked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


class ResidualAddDescriptor(CachedOpDescriptor):
    """The sum that ends a layer; the same operators serve it on every device."""

    source = torch.ops.onboard.torch_residual_add

    @property
    def cached_names(self) -> Mapping[str, str]:
        """Torch's operator for the kernels' back end, too."""
        return dict.fromkeys(("torch", "triton"), super().cached_names["torch"])

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return one cache: the sum of each token, in its own dtype, where the token's keys lie.

        What is known of a prompt's beginning, or kept while a sequence waits, then has its hidden
        states, too.
        """
        value = tensor_argument(node, 0).meta["val"]
        return {"hidden_cache": KVPagedResource(1, int(value.shape[-1]), value.dtype, page_size)}


@register_transform("insert_cached_residual_add")
class InsertCachedResidualAdd(InsertCached):
    """The hidden state of each token in pages of the cache."""

    descriptor = ResidualAddDescriptor()

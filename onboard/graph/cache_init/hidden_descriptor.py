"""What is kept of hidden states: a row of each token, where the token's keys lie."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, tensor_argument


class HiddenStatesDescriptor(CachedOpDescriptor):
    """An operator whose result is kept; the same operators serve it on every device."""

    def __init__(self, op: str) -> None:
        self.source = getattr(torch.ops.onboard, op)

    @property
    def cached_names(self) -> Mapping[str, str]:
        """Torch's operator for the kernels' back end, too."""
        return dict.fromkeys(("torch", "triton"), super().cached_names["torch"])

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return one cache: the row of each token, in its own dtype, where its keys lie.

        What is known of a prompt's beginning, or kept while a sequence waits, then has its hidden
        states, too.
        """
        value = tensor_argument(node, 0).meta["val"]
        return {"hidden_cache": KVPagedResource(1, int(value.shape[-1]), value.dtype, page_size)}

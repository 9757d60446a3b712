"""Swap every gated delta rule for one that keeps each sequence's state."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, StateResource
from onboard.graph.cache_init.descriptor import StateDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform
from onboard.ops.ssm.ssm import wide_dtype


class GatedDeltaRuleDescriptor(StateDescriptor):
    """Linear attention with decay and correction."""

    source = torch.ops.onboard.torch_gated_delta_rule
    num_tensors = 5

    def obstacle(self, backend: str, node: fx.Node) -> str:
        """flash-linear-attention multiplies float32 in tf32, which is not what was asked for."""
        if backend == "fla" and tensor_argument(node, 0).meta["val"].dtype.itemsize > 2:
            return "flash-linear-attention takes 16-bit tensors"
        return super().obstacle(backend, node)

    def resources(self, node: fx.Node, page_size: int, dtype: torch.dtype | None) -> dict[str, CacheResource]:
        """Return one cache of states, in the recurrence's own dtype."""
        key, value = (tensor_argument(node, index).meta["val"] for index in (1, 2))
        shape = (int(value.shape[2]), int(key.shape[3]), int(value.shape[3]))
        return {"delta_cache": StateResource(shape, wide_dtype(value))}


@register_transform("insert_cached_gated_delta_rule")
class InsertCachedGatedDeltaRule(InsertCached):
    """The state of each sequence in a slot of the cache."""

    descriptor = GatedDeltaRuleDescriptor()

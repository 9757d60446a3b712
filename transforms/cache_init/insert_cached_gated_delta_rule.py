"""Swap every gated delta rule for one that keeps each sequence's state."""

from __future__ import annotations

from torch import fx

from onboard.graph.cache_init.descriptor import StateDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform


class GatedDeltaRuleDescriptor(StateDescriptor):
    """Linear attention with decay and correction."""

    def obstacle(self, backend: str, node: fx.Node) -> str:
        """flash-linear-attention multiplies float32 in tf32, which is not what was asked for."""
        if backend == "fla" and tensor_argument(node, 0).meta["val"].dtype.itemsize > 2:
            return "flash-linear-attention takes 16-bit tensors"
        return super().obstacle(backend, node)


@register_transform("insert_cached_gated_delta_rule")
class InsertCachedGatedDeltaRule(InsertCached):
    """The state of each sequence in a slot of the cache."""

    descriptor = GatedDeltaRuleDescriptor("torch_gated_delta_rule")

"""Swap every Mamba scan for one that keeps each sequence's state."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, StateResource
from onboard.graph.cache_init.descriptor import StateDescriptor, tensor_argument
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.transform import register_transform
from onboard.ops.ssm.ssm import wide_dtype


class SelectiveScanDescriptor(StateDescriptor):
    """Mamba's selective scan."""

    source = torch.ops.onboard.torch_selective_scan
    num_tensors = 8

    def resources(self, node: fx.Node, page_size: int, dtype: torch.dtype | None) -> dict[str, CacheResource]:
        """Return one cache of states, in the recurrence's own dtype."""
        x, decays = (tensor_argument(node, index).meta["val"] for index in (0, 2))
        return {"scan_cache": StateResource((int(decays.shape[0]), int(decays.shape[1])), wide_dtype(x))}


@register_transform("insert_cached_selective_scan")
class InsertCachedSelectiveScan(InsertCached):
    """The state of each sequence in a slot of the cache."""

    descriptor = SelectiveScanDescriptor()

"""Swap every Mamba 2 scan for one that keeps each sequence's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import fx, nn

from onboard.graph.cache import CacheResource, StateResource
from onboard.graph.context import TransformContext
from onboard.graph.descriptor import StateDescriptor, tensor_argument
from onboard.graph.insert_cached import InsertCached, InsertCachedConfig
from onboard.graph.transform import TransformInfo, register_transform
from onboard.ops.ssm import wide_dtype


class SSMDescriptor(StateDescriptor):
    """Mamba 2's scan."""

    source = torch.ops.onboard.torch_ssm
    cached_names: ClassVar[Mapping[str, str]] = {"torch": "torch_cached_ssm", "triton": "triton_cached_ssm"}
    num_tensors = 7

    def resources(self, node: fx.Node, page_size: int, dtype: torch.dtype | None) -> dict[str, CacheResource]:
        """Return one cache of states, in the recurrence's own dtype."""
        x, projected = (tensor_argument(node, index).meta["val"] for index in (0, 2))
        shape = (int(x.shape[2]), int(x.shape[3]), int(projected.shape[3]))
        return {"ssm_cache": StateResource(shape, wide_dtype(x))}


class InsertCachedSSMAttentionConfig(InsertCachedConfig):
    """Fields of `insert_cached_ssm_attention`."""

    ssm_replay: bool = False
    """Replay the tokens of a speculative step from the state before it; no effect, there is no such step yet."""


@register_transform("insert_cached_ssm_attention")
class InsertCachedSSMAttention(InsertCached):
    """The state of each sequence in a slot of the cache."""

    config_class = InsertCachedSSMAttentionConfig
    descriptor = SSMDescriptor()

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Replace the nodes; a replay that was asked for is recorded as without effect."""
        if isinstance(self.config, InsertCachedSSMAttentionConfig) and self.config.ssm_replay:
            context.facts.append(f"{self.key}: ssm_replay has no effect, there are no speculative steps")
        return super().apply(gm, context)

"""Swap every Mamba 2 scan for one that keeps each sequence's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import fx, nn

from onboard.cache.resources import CacheResource, StateResource
from onboard.graph.cache_init.descriptor import (
    NarrowStateDescriptor,
    StateDescriptor,
    tensor_argument,
)
from onboard.graph.cache_init.insert_cached import InsertCached, InsertCachedConfig
from onboard.graph.context import TransformContext
from onboard.graph.transform import TransformInfo, register_transform
from onboard.ops.library import forms_of


class ReplayedSSMDescriptor(StateDescriptor):
    """The scan whose last step can be taken back, of up to `tokens` tokens."""

    @property
    def cached_names(self) -> Mapping[str, str]:
        """The forms that replay."""
        return forms_of("torch_replayed_ssm")

    def __init__(self, tokens: int) -> None:
        super().__init__("torch_ssm")
        self.tokens = tokens

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return the states before the last step, what its tokens came with, and how many tokens
        were before it.
        """
        x, projected, dt = (tensor_argument(node, index).meta["val"] for index in (0, 2, 5))
        kept = {
            f"replay_{name}_cache": StateResource(
                (self.tokens, *map(int, value.shape[2:])), value.dtype
            )
            for name, value in (("x", x), ("b", projected), ("dt", dt))
        }
        start = {"replay_start_cache": StateResource((1,), torch.int64)}
        return {**super().resources(node, page_size, dtype), **kept, **start}


class InsertCachedSSMAttentionConfig(InsertCachedConfig):
    """Fields of `insert_cached_ssm_attention`."""

    ssm_replay: bool = False
    """Keep the state before each step with what the step's tokens came with, and begin the next
    step by replaying as many of them as counted (as of a draft's tokens)."""
    replay_tokens: int = Field(default=8, ge=1)
    """Most tokens of a step that can be taken back; a longer one, as of a prompt, cannot be."""


@register_transform("insert_cached_ssm_attention")
class InsertCachedSSMAttention(InsertCached):
    """The state of each sequence in a slot of the cache."""

    config_class = InsertCachedSSMAttentionConfig
    descriptor: ClassVar[StateDescriptor] = NarrowStateDescriptor("torch_ssm")

    def __init__(self, config: InsertCachedConfig) -> None:
        super().__init__(config)
        if isinstance(config, InsertCachedSSMAttentionConfig) and config.ssm_replay:
            self.descriptor = ReplayedSSMDescriptor(config.replay_tokens)  # type: ignore[misc]

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Replace the nodes; that a run makes no use of a replay, and another dtype of states than
        the recurrence's, are facts.
        """
        gm, info = super().apply(gm, context)
        dtype = context.runtime.kv_cache_config.mamba_ssm_cache_dtype
        if info.num_matches and dtype not in ("auto", "float32"):
            context.facts.append(self._said_of(dtype))
        if info.num_matches and isinstance(self.descriptor, ReplayedSSMDescriptor):
            context.facts.append(
                f"{self.key}: ssm_replay lets steps be taken back, and no run drafts tokens yet"
            )
        return gm, info

    def _said_of(self, dtype: str) -> str:
        asked = "kv_cache_config.mamba_ssm_cache_dtype"
        if isinstance(self.descriptor, ReplayedSSMDescriptor):
            return f"{self.key}: {asked} {dtype} is not used: states that are replayed are float32"
        return f"{self.key}: states are kept in {dtype} ({asked}), transformers' are float32"

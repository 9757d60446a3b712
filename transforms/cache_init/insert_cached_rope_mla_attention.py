"""Swap every latent attention that rotates by itself for one over a paged cache of latents."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.cache_init.latents import MLADescriptor
from onboard.graph.transform import register_transform


class RopeMLADescriptor(MLADescriptor):
    """Latent attention behind a rotation of its own; keys are kept rotated."""

    source = torch.ops.onboard.torch_rope_mla

    def check(self, node: fx.Node) -> None:
        """Nothing is left to refuse: it is causal."""


@register_transform("insert_cached_rope_mla_attention")
class InsertCachedRopeMLAAttention(InsertCached):
    """Latents and rotated keys of each token in pages of the cache."""

    descriptor = RopeMLADescriptor()

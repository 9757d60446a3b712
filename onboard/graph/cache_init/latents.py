"""Latent attention with its cache: what transforms have to know of it."""

from __future__ import annotations

import torch
from torch import fx

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.graph.backends import kernel_obstacle
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, refuse_unless, tensor_argument

MOST_RANK = 1024
"""Larger latents fit in no tile of the kernels."""


class MLADescriptor(CachedOpDescriptor):
    """Latent attention: one normalised latent and one rotated key a token, the same for all
    heads.
    """

    source = torch.ops.onboard.torch_mla

    def check(self, node: fx.Node) -> None:
        """Refuse attention to later tokens."""
        refuse_unless(node, is_causal=True)

    def kernel_obstacle(self, node: fx.Node) -> str:
        """Kernels keep the latents of a tile's rows in registers."""
        latent = tensor_argument(node, 2).meta["val"]
        too_large = (
            f"a rank of {latent.shape[-1]} is over {MOST_RANK}"
            if latent.shape[-1] > MOST_RANK
            else ""
        )
        return kernel_obstacle(latent.dtype) or too_large

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return one cache: the latent and the rotated key of a token side by side."""
        latent, rotated = (tensor_argument(node, index).meta["val"] for index in (2, 3))
        return {
            "mla_cache": KVPagedResource(
                1, latent.shape[-1] + rotated.shape[-1], dtype or latent.dtype, page_size
            )
        }

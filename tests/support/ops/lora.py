"""A linear layer's outputs with adapters, and what they are in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Adapted:
    outputs: Tensor
    input: Tensor
    down: Tensor
    up: Tensor
    sizes: list[int]
    adapters: Tensor

    @classmethod
    def drawn(
        cls,
        tokens: int,
        inputs: int,
        sizes: list[int],
        count: int,
        rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Adapted:
        seed = int(torch.randint(2**31, ()))
        print(f"seed {seed}")
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(device, dtype)

        own = torch.randint(count + 1, (1, tokens), generator=random).to(device)
        down = normal(count, len(sizes) * rank, inputs) / inputs**0.5
        up = normal(count, rank, sum(sizes)) / rank**0.5
        return cls(normal(1, tokens, sum(sizes)), normal(1, tokens, inputs), down, up, sizes, own)

    def arguments(self) -> tuple[Any, ...]:
        return self.outputs, self.input, self.down, self.up, self.sizes, self.adapters

    def expected(self) -> Tensor:
        """One token, one layer at a time."""
        out = self.outputs.double().reshape(-1, self.outputs.shape[-1]).clone()
        x, rank = self.input.double().flatten(0, 1), self.up.shape[1]
        for token, adapter in enumerate(self.adapters.flatten().tolist()):
            first = 0
            for layer, size in enumerate(self.sizes if adapter else ()):
                down = self.down[adapter - 1, layer * rank : (layer + 1) * rank].double()
                up = self.up[adapter - 1, :, first : first + size].double()
                out[token, first : first + size] += up.T @ (down @ x[token])
                first += size
        return out.view(self.outputs.shape)

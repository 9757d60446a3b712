"""Attention over rows of several texts, number by number in float64: no code in common with the
exported op.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

LENGTHS: list[int] = []
"""Of the texts that a row holds, one after the other."""


class Attention(nn.Module):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        cache_config: Any = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        names = cache_config.layers
        assert prefix not in names
        assert [part.isdigit() for part in prefix.split(".")].count(True) == 1, prefix
        names.append(prefix)
        self.heads, self.size, self.scale, self.kv_heads = (
            num_heads,
            head_size,
            scale,
            num_kv_heads or num_heads,
        )
        self.slopes, self.cap, self.sliding_window = (
            alibi_slopes,
            logits_soft_cap,
            per_layer_sliding_window,
        )
        self.sinks = sinks

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert query.dim() == 2
        rows = [each.double().split(LENGTHS) for each in (query, key, value)]
        return torch.cat([self._text(*text) for text in zip(*rows, strict=True)]).to(query.dtype)

    def _text(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = []
        for head in range(self.heads):
            own, shared = self._columns(head), self._columns(head * self.kv_heads // self.heads)
            rows = [
                self._token(query[i, own], key[: i + 1, shared], value[: i + 1, shared], head)
                for i in range(len(query))
            ]
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=-1)

    def _columns(self, head: int) -> slice:
        return slice(head * self.size, (head + 1) * self.size)

    def _token(self, query: Tensor, keys: Tensor, values: Tensor, head: int) -> Tensor:
        seen = len(keys) if self.sliding_window is None else min(self.sliding_window, len(keys))
        scores = [float(query @ key) * self.scale for key in keys[-seen:]]
        if self.cap is not None:
            scores = [self.cap * math.tanh(score / self.cap) for score in scores]
        if self.slopes is not None:
            scores = [
                score - self.slopes[head] * (seen - 1 - place) for place, score in enumerate(scores)
            ]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (
            math.exp(float(self.sinks[head])) if self.sinks is not None else 0.0
        )
        return sum(
            weight / total * row for weight, row in zip(weights, values[-seen:], strict=True)
        )

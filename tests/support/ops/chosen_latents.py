"""Arguments of cached latent attention to chosen keys, for rows of `tests.support.ops.ragged`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.ops.ragged import DEVICE, PAGED, Row, mla, randn


def sparse_mla(
    row: Row,
    heads: int,
    rank: int,
    rope: int,
    top_k: int = 0,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    sinks: bool = True,
) -> list[Any]:
    """Arguments of a cached latent attention to `top_k` chosen keys, 0: to all."""
    *tokens, scale = mla(row, heads, rank, rope, dtype, scale=0.3 if sinks else None)
    cache, count = tokens[-1], len(PAGED) + 1
    chosen = _chosen(row, top_k) if top_k else None
    logits = randn(heads, dtype=dtype) if sinks else None
    return [*tokens[:-count], chosen, *row.metadata(*PAGED), cache, scale, logits, window]


def _chosen(row: Row, top_k: int) -> Tensor:
    """Of each token itself and others before it in any order, and where there are too few: one behind
    it, and none.
    """
    chosen = torch.full((1, row.tokens, top_k), -1, dtype=torch.int32)
    starts, lengths = row.args["cu_seqlens"].tolist(), row.args["kv_lens"].tolist()
    for start, end, length in zip(starts, starts[1:], lengths, strict=False):
        for token in range(start, end):
            position = length - end + token
            others = torch.randperm(position)[: top_k - 1].tolist()
            ids = torch.tensor([position, *others, position + 1][:top_k])
            chosen[0, token, torch.randperm(top_k)[: len(ids)]] = ids.int()
    return chosen.to(DEVICE)

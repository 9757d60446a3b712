"""The choice of keys for sparse attention: the lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.attention import SCORES_AT_ONCE
from onboard.ops.library import register_op


def index_scores(query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Return sum over heads of weight * relu(query . key * scale), [batch, queries, keys] float32 or wider.

    Args:
        query: [batch, queries, heads, dim].
        key: [batch, keys, dim].
        weights: [batch, queries, heads].
        scale: factor of the products.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.transpose(-1, -2).to(wide).unsqueeze(1)
    block = max(1, SCORES_AT_ONCE // max(1, key.shape[0] * query.shape[2] * key.shape[1]))
    parts = []
    for start in range(0, max(1, query.shape[1]), block):
        rows = slice(start, start + block)
        products = (torch.matmul(query[:, rows].to(wide), keys) * scale).relu()
        parts.append(torch.matmul(weights[:, rows].to(wide).unsqueeze(-2), products).squeeze(-2))
    return torch.cat(parts, dim=1)


def _fake(query: Tensor, key: Tensor, weights: Tensor, top_k: int, *_: object, **__: object) -> Tensor:
    batch, length = query.shape[:2]
    chosen = torch.sym_min(top_k, length)  # type: ignore[no-untyped-call]
    return query.new_empty((batch, length, chosen), dtype=torch.int64)


@register_op(_fake, carries_state=True)
def torch_lightning_indexer(query: Tensor, key: Tensor, weights: Tensor, top_k: int, scale: float = 1.0) -> Tensor:
    """Return the `top_k` keys of the highest scores for each query, among those that are not later.

    A score is sum over heads of weight * relu(query . key * scale), in float32 or wider.

    Args:
        query: [batch, sequence, heads, dim].
        key: [batch, sequence, dim], the same for all heads.
        weights: [batch, sequence, heads].
        top_k: keys to choose; all of them when the sequence is shorter.
        scale: factor of the products.

    Returns:
        [batch, sequence, min(top_k, sequence)] int64, the best first. A query that has fewer keys gets later ones
        as well, behind its own, which attention has to leave out.
    """
    scores = index_scores(query, key, weights, scale)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf).topk(min(top_k, scores.shape[-1]), dim=-1).indices

"""The choice of keys for sparse attention: the lightning indexer (DeepSeek-V3.2, arXiv:2512.02556,
section 2.1).

A key that no head likes has a score of exactly zero, and with few heads there are many such keys.
`torch.topk` takes any of equals, others in a prompt than in a decode step; here the first of equals
count, in every op, batch and chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.attention.attention import SCORES_AT_ONCE
from onboard.ops.library import register_op


def index_scores(query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Return sum over heads of weight * relu(query . key * scale), [batch, queries, keys] float32
    or wider.

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


def best_first(scores: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` highest scores along the last dimension, best first; of equals
    the lower id first.

    `scores` [..., keys]; the result is [..., count] int64.
    """
    # -0.0 + 0.0 is 0.0: zeros are equals
    ranked = torch.sort(scores + 0.0, dim=-1, descending=True, stable=True)
    return ranked.indices[..., :count].contiguous()


def share_of_ties(heads: int, dim: int, top_k: int) -> float:
    """Return for how many random queries, as a share, equal scores decide which keys are the
    `top_k` best.

    Queries, keys and weights are normal numbers, and prompts up to four times as long as `top_k`,
    which counts as 32 at
    most: how many keys get a score of zero hangs on the number of heads alone.
    """
    draw = torch.Generator().manual_seed(0)
    kept = min(top_k, 32)
    query, key = (
        torch.randn(2, 4 * kept, *shape, generator=draw) for shape in ((heads, dim), (dim,))
    )
    scores = index_scores(query, key, torch.randn(2, 4 * kept, heads, generator=draw), 1.0)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    ranked = scores.masked_fill(later, -torch.inf).sort(dim=-1, descending=True).values[:, kept:]
    return float((ranked[..., kept - 1] == ranked[..., kept]).double().mean())


def tie_note(heads: int, dim: int, top_k: int) -> str:
    """Say that an indexer's scores tie where its `top_k` best keys end, "" where they do not."""
    if not (share := share_of_ties(heads, dim, top_k)):
        return ""
    return (
        f"scores of the indexer tie for {share:.0%} of random queries ({heads} heads): transformers' own prefill and "
        "decode choose differently among equals, here the first of them count"
    )


def _fake(
    query: Tensor, key: Tensor, weights: Tensor, top_k: int, *_: object, **__: object
) -> Tensor:
    batch, length = query.shape[:2]
    chosen = torch.sym_min(top_k, length)  # type: ignore[no-untyped-call]
    return query.new_empty((batch, length, chosen), dtype=torch.int64)


@register_op(
    _fake,
    carries_state=True,
    described="Indexer: chooses the keys that each query attends to.",
)
def torch_lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, top_k: int, scale: float = 1.0
) -> Tensor:
    """Return the `top_k` keys of the highest scores for each query, among those that are not later.

    A score is sum over heads of weight * relu(query . key * scale), in float32 or wider.

    Args:
        query: [batch, sequence, heads, dim].
        key: [batch, sequence, dim], the same for all heads.
        weights: [batch, sequence, heads].
        top_k: keys to choose; all of them when the sequence is shorter.
        scale: factor of the products.

    Returns:
        [batch, sequence, min(top_k, sequence)] int64, the best first, of equals the first. A query
        that has fewer keys gets later ones as well, behind its own, which attention has to leave
        out.
    """
    scores = index_scores(query, key, weights, scale)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return best_first(scores.masked_fill(later, -torch.inf), min(top_k, scores.shape[-1]))

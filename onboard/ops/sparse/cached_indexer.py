"""The lightning indexer over a paged cache of its keys (DeepSeek-V3.2, arXiv:2512.02556, section
2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.attention.cached_attention import read_sequence, write_tokens
from onboard.ops.library import register_op
from onboard.ops.sparse.indexer import best_first, index_scores


def _fake(query: Tensor, key: Tensor, weights: Tensor, *rest: object, **options: object) -> Tensor:
    top_k = options.get("top_k", rest[6] if len(rest) > 6 else None)
    assert isinstance(top_k, int)
    return query.new_empty((*query.shape[:2], top_k), dtype=torch.int64)


@register_op(_fake, mutates=("index_cache",), cached_form_of="torch_lightning_indexer")
def torch_cached_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    index_cache: Tensor,
    top_k: int,
    scale: float = 1.0,
) -> Tensor:
    """`torch_lightning_indexer` of a flat row of tokens: store their keys, then score all keys of
    their sequences.

    A decode step scores all sequences at once and reads nothing back from the device.

    Args:
        query, key, weights: as in `torch_lightning_indexer`, with a batch of one row.
        cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host: as in
            `torch_cached_attention`.
        index_cache: [pages, 1, page_size, dim], written to.
        top_k: keys to choose.
        scale: factor of the products.

    Returns:
        [1, tokens, top_k] int64, positions within each token's sequence, the best first and of
        equals the first; -1 where there are fewer keys.
    """
    write_tokens(index_cache, key[0].unsqueeze(1), slot_mapping)
    sequences, _, longest_query, longest_kv, *_ = batch_info_host.tolist()
    if longest_query == 1:
        pages = block_table[:, : -(-longest_kv // index_cache.shape[2])]
        stored = index_cache[pages].flatten(1, 3).to(query.dtype)  # [sequences, keys, dim]
        scores = index_scores(query[0].unsqueeze(1), stored, weights[0].unsqueeze(1), scale)
        return _best(scores, (kv_lens - 1).view(-1, 1, 1), top_k).view(1, -1, top_k)
    chosen = query.new_full((*query.shape[:2], top_k), -1, dtype=torch.int64)
    starts, lengths = cu_seqlens.tolist(), kv_lens.tolist()
    for sequence in range(sequences):
        rows, length = slice(starts[sequence], starts[sequence + 1]), lengths[sequence]
        stored = read_sequence(index_cache, block_table[sequence], length)[:, 0].to(query.dtype)
        scores = index_scores(query[:, rows], stored, weights[:, rows], scale)
        positions = torch.arange(length - scores.shape[1], length, device=scores.device)
        chosen[:, rows] = _best(scores, positions.unsqueeze(1), top_k)
    return chosen


def _best(scores: Tensor, last: Tensor, top_k: int) -> Tensor:
    """Return the ids of the highest scores among keys up to `last`, [batch, queries, top_k], -1
    behind them.
    """
    later = torch.arange(scores.shape[-1], device=scores.device) > last
    seen = scores.masked_fill(later, -torch.inf)
    best = best_first(seen, min(top_k, scores.shape[-1]))
    ids = best.masked_fill(seen.gather(-1, best) == -torch.inf, -1)
    return F.pad(ids, (0, top_k - ids.shape[-1]), value=-1)

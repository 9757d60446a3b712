"""The choice of whole blocks of keys for sparse attention, as it is and over a paged cache of the
blocks' keys.

Tokens are counted in blocks from a text's first one on. A block has one key for the indexer, which
stands with its last token; a query chooses among the blocks that have ended with it or before it,
by the score of the lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.attention.cached_attention import read_sequence, write_tokens
from onboard.ops.library import register_op
from onboard.ops.sparse.indexer import best_first, index_scores


def _width(top_k: int, block_size: int, expand: bool) -> int:
    return top_k * block_size + block_size - 1 if expand else top_k


def _fake(
    query: Tensor,
    key: Tensor,
    weights: Tensor | None,
    top_k: int,
    block_size: int,
    scale: float = 1.0,
    expand: bool = False,
) -> Tensor:
    return query.new_empty((*query.shape[:2], _width(top_k, block_size, expand)), dtype=torch.int64)


@register_op(
    _fake,
    carries_state=True,
    described="Indexer: chooses the blocks of keys that each query attends to.",
)
def torch_block_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor | None,
    top_k: int,
    block_size: int,
    scale: float = 1.0,
    expand: bool = False,
) -> Tensor:
    """Return the `top_k` blocks of the highest scores for each query, among those that have ended.

    A score is sum over heads of weight * relu(query . key * scale), in float32 or wider.

    Args:
        query: [batch, sequence, heads, dim].
        key: [batch, sequence, dim]; that of a block's last token is the block's, the others count
            for nothing.
        weights: [batch, sequence, heads]; None: 1.
        top_k: blocks to choose.
        block_size: tokens of a block.
        scale: factor of the products.
        expand: give the tokens of the chosen blocks, and those of the query's own block if it has
            not ended.

    Returns:
        [batch, sequence, top_k] int64, numbers of blocks, the best first and of equals the first;
        expanded: [batch, sequence, top_k * block_size + block_size - 1], positions of tokens. -1
        where there are fewer.
    """
    positions = torch.arange(query.shape[1], device=query.device)
    return _chosen(
        query,
        key[:, block_size - 1 :: block_size],
        weights,
        positions,
        top_k,
        block_size,
        scale,
        expand,
    )


def _chosen(
    query: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    positions: Tensor,
    top_k: int,
    block_size: int,
    scale: float,
    expand: bool,
) -> Tensor:
    """Return what queries at `positions`, [queries] or [batch, queries], choose of blocks [batch,
    blocks, dim].
    """
    ones = query.new_ones(query.shape[:-1]) if weights is None else weights
    scores = index_scores(query, keys, ones, scale)
    ended = ((positions + 1) // block_size).unsqueeze(-1)
    open_blocks = torch.arange(keys.shape[1], device=query.device) >= ended
    seen = scores.masked_fill(open_blocks, -torch.inf)
    best = best_first(seen, min(top_k, keys.shape[1]))
    blocks = best.masked_fill(seen.gather(-1, best) == -torch.inf, -1)
    blocks = F.pad(blocks, (0, top_k - blocks.shape[-1]), value=-1)
    return _tokens(blocks, positions.unsqueeze(-1), block_size) if expand else blocks


def _tokens(blocks: Tensor, positions: Tensor, size: int) -> Tensor:
    """Return the tokens of blocks, and those from the end of the last one that ended up to the
    query; -1 for none.
    """
    inside = (blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)).flatten(-2)
    inside = inside.masked_fill(blocks.repeat_interleave(size, dim=-1) < 0, -1)
    own = (positions + 1) // size * size + torch.arange(size - 1, device=blocks.device)
    own = own.masked_fill(own > positions, -1).expand(*blocks.shape[:-1], -1)
    return torch.cat([inside, own], dim=-1)


def _fake_cached(
    query: Tensor,
    key: Tensor,
    weights: Tensor | None,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    index_cache: Tensor,
    top_k: int,
    block_size: int,
    scale: float = 1.0,
    expand: bool = False,
) -> Tensor:
    return _fake(query, key, weights, top_k, block_size, scale, expand)


@register_op(_fake_cached, mutates=("index_cache",), cached_form_of="torch_block_indexer")
def torch_cached_block_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor | None,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    index_cache: Tensor,
    top_k: int,
    block_size: int,
    scale: float = 1.0,
    expand: bool = False,
) -> Tensor:
    """`torch_block_indexer` of a flat row of tokens: store their keys, then score the blocks of
    their sequences.

    A decode step scores all sequences at once and reads nothing back from the device.

    Args:
        query, key, weights: as in `torch_block_indexer`, with a batch of one row.
        cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host: as in
            `torch_cached_attention`.
        index_cache: [pages, 1, page_size, dim], written to.
        top_k, block_size, scale, expand: as in `torch_block_indexer`.

    Returns:
        As `torch_block_indexer`, [1, tokens, ...], counted within each token's sequence; -1 for
        tokens beyond the last.
    """
    write_tokens(index_cache, key[0].unsqueeze(1), slot_mapping)
    sequences, _, longest_query, longest_kv, *_ = batch_info_host.tolist()
    settings = (top_k, block_size, scale, expand)
    if longest_query == 1:
        ends = (
            torch.arange(longest_kv // block_size, device=query.device) * block_size
            + block_size
            - 1
        )
        pages = block_table.long()[:, ends // index_cache.shape[2]]
        # [sequences, blocks, dim]
        stored = index_cache[pages, 0, ends % index_cache.shape[2]].to(query.dtype)
        last = (kv_lens - 1).long().unsqueeze(1)
        ones = None if weights is None else weights[0].unsqueeze(1)
        return _chosen(query[0].unsqueeze(1), stored, ones, last, *settings).transpose(0, 1)
    chosen = _fake(query, key, weights, *settings).fill_(-1)
    starts, lengths = cu_seqlens.tolist(), kv_lens.tolist()
    for sequence in range(sequences):
        rows, length = slice(starts[sequence], starts[sequence + 1]), lengths[sequence]
        stored = read_sequence(index_cache, block_table[sequence], length)[:, 0].to(query.dtype)
        own = None if weights is None else weights[:, rows]
        positions = torch.arange(length - (rows.stop - rows.start), length, device=query.device)
        chosen[:, rows] = _chosen(
            query[:, rows], stored[:, block_size - 1 :: block_size], own, positions, *settings
        )
    return chosen

"""Attention to the keys that were chosen for each query, as it is and over a paged cache."""

from __future__ import annotations

from torch import Tensor

from onboard.ops.attention.attention import torch_attention
from onboard.ops.attention.cached_attention import only_seen, read_sequence, write_tokens
from onboard.ops.library import register_op
from onboard.ops.sparse.sparse import chosen_keys


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@register_op(
    _fake,
    carries_state=True,
    attends=True,
    described="Attention to the keys that an indexer chose",
)
def torch_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float | None = None
) -> Tensor:
    """Causal attention of each query to chosen keys.

    Args:
        query, key, value: as in `torch_attention`, layout bsnd; the last query meets the last key.
        indices: [batch, sq, chosen] int64, the keys of each query; those behind it count for
            nothing, nor does -1.
        scale: as in `torch_attention`.

    Returns:
        [batch, sq, heads, value_dim].
    """
    return torch_attention(query, key, value, chosen_keys(indices, key.shape[1]), 0.0, True, scale)


@register_op(_fake, mutates=("k_cache", "v_cache"), cached_form_of="torch_sparse_attention")
def torch_cached_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float | None = None,
) -> Tensor:
    """`torch_sparse_attention` of a flat row of tokens: store their keys and values, then attend
    over the pages.

    Arguments are those of `torch_sparse_attention` with a batch of one row and positions within
    each token's sequence, then metadata and caches as in `torch_cached_attention`. A decode step
    reads the chosen keys alone, however long a sequence is, and nothing back from the device.
    """
    write_tokens(k_cache, key[0], slot_mapping)
    write_tokens(v_cache, value[0], slot_mapping)
    sequences, _, longest_query, *_ = batch_info_host.tolist()
    if longest_query == 1:
        seen = (indices[0] >= 0) & (indices[0] < kv_lens.unsqueeze(1))
        read = (_at(cache, block_table, indices[0]).to(query.dtype) for cache in (k_cache, v_cache))
        keys, values = (only_seen(stored, seen) for stored in read)
        out = torch_attention(
            query[0].unsqueeze(1), keys, values, seen[:, None, None], 0.0, False, scale
        )
        return out.transpose(0, 1)
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    starts, lengths = cu_seqlens.tolist(), kv_lens.tolist()
    for index in range(sequences):
        rows = slice(starts[index], starts[index + 1])
        stored = (
            read_sequence(cache, block_table[index], lengths[index]) for cache in (k_cache, v_cache)
        )
        keys, values = (each.transpose(1, 2).to(query.dtype) for each in stored)
        out[:, rows] = torch_sparse_attention(query[:, rows], keys, values, indices[:, rows], scale)
    return out


def _at(cache: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    """Return what a cache holds at positions [sequences, keys], [sequences, keys, kv_heads, dim];
    -1 reads 0.
    """
    at = positions.clamp(min=0)
    size = cache.shape[2]
    pages = block_table.long().gather(1, at // size)
    return cache[pages, :, at % size]

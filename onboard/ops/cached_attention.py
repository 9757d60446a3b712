"""Attention over a paged key-value cache (Kwon et al. 2023, arXiv:2309.06180): the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.attention import torch_attention
from onboard.ops.library import register_op


def fake_cached_attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """Return an empty output of `torch_cached_attention`: [1, tokens, heads, value_dim]."""
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def write_tokens(cache: Tensor, tokens: Tensor, slot_mapping: Tensor) -> None:
    """Store tokens [tokens, kv_heads, dim] in their slots of a cache [pages, kv_heads, page_size, dim]."""
    page_size = cache.shape[2]
    cache[slot_mapping // page_size, :, slot_mapping % page_size] = as_stored(tokens, cache.dtype)


def as_stored(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return tokens rounded to a cache's dtype.

    float8_e4m3fn keeps values as they are, without a scale: keys and values are of the order of one, where its steps
    are as fine as anywhere. It has no infinity; what is larger than its largest number, 448, becomes that.
    """
    if dtype == torch.float8_e4m3fn:
        most = torch.finfo(dtype).max
        tokens = tokens.clamp(-most, most)
    return tokens.to(dtype)


def read_sequence(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """Return the first `length` tokens of a sequence, [1, kv_heads, length, dim]."""
    rows = cache[pages[: -(-length // cache.shape[2])].long()]
    return rows.transpose(0, 1).flatten(1, 2)[None, :, :length]


@register_op(fake_cached_attention, mutates=("k_cache", "v_cache"))
def torch_cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Causal attention of a flat row of tokens: store their keys and values, then attend over the pages.

    Prefill, chunked prefill, decode and mixes of them are all one to it: a sequence's new tokens are its last ones.

    Args:
        query: [1, tokens, heads, head_dim].
        key: [1, tokens, kv_heads, head_dim].
        value: [1, tokens, kv_heads, value_dim].
        cu_seqlens: [sequences + 1] int32, where each sequence's new tokens start.
        kv_lens: [sequences] int32, keys of each sequence, the new ones included.
        block_table: [sequences, pages] int32, the pages of each sequence.
        slot_mapping: [tokens] int64, page * page_size + offset of each token.
        batch_info_host: [5] int32 on the CPU; the first entry is the number of sequences.
        k_cache: [pages, kv_heads, page_size, head_dim], written to; its dtype may differ from the activations'.
        v_cache: [pages, kv_heads, page_size, value_dim], likewise.
        sinks, scale, sliding_window, logit_cap, alibi_slopes, chunk_size: as in `torch_attention`.

    Returns:
        [1, tokens, heads, value_dim]; zeros for tokens beyond the last sequence.
    """
    write_tokens(k_cache, key[0], slot_mapping)
    write_tokens(v_cache, value[0], slot_mapping)
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    starts = cu_seqlens.tolist()
    lengths = kv_lens.tolist()
    for sequence in range(int(batch_info_host[0])):
        rows = slice(starts[sequence], starts[sequence + 1])
        keys = read_sequence(k_cache, block_table[sequence], lengths[sequence]).to(query.dtype)
        values = read_sequence(v_cache, block_table[sequence], lengths[sequence]).to(query.dtype)
        new = query[:, rows].transpose(1, 2)
        options = (scale, sinks, sliding_window, logit_cap, "bnsd", alibi_slopes, chunk_size)
        mixed = torch_attention(new, keys, values, None, 0.0, True, *options)
        out[:, rows] = mixed.transpose(1, 2)
    return out

"""Attention to the keys that ask for it most, as it is and over a paged cache.

Each key has a bias of its own, from its value; a query sees the `keep` keys of the largest bias
among those before it, as in dynamic mask attention (Shi et al. 2025, arXiv:2508.02124). Of equal
biases the first count; those of the same token are equal up to the rounding of the product they
come from, which the number of its rows may change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.attention.attention import torch_attention
from onboard.ops.attention.cached_attention import (
    first_seen,
    only_seen,
    read_sequence,
    write_tokens,
)
from onboard.ops.library import register_op
from onboard.ops.sparse.indexer import best_first


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def kept_bias(
    key_bias: Tensor, last: Tensor, keep: int, sliding_window: int | None = None
) -> Tensor:
    """Return what is added to the scores, [batch, kv_heads, queries, keys]: the bias of kept keys,
    -inf for the others.

    Args:
        key_bias: [batch, keys, kv_heads].
        last: [queries, 1] or [batch, 1, queries, 1], the last key that each query may see.
        keep: keys that a query keeps; all of them when there are fewer.
        sliding_window: keys, itself included, among which a query chooses; None: all up to it.
    """
    keys = key_bias.shape[1]
    distance = last - torch.arange(keys, device=key_bias.device)
    hidden = (distance < 0) | (distance >= (keys if sliding_window is None else sliding_window))
    bias = key_bias.transpose(1, 2).unsqueeze(2).masked_fill(hidden, -torch.inf)
    best = best_first(bias, min(keep, keys))
    return torch.full_like(bias, -torch.inf).scatter(-1, best, bias.gather(-1, best))


@register_op(
    _fake,
    carries_state=True,
    attends=True,
    described="Attention to the keys of the largest bias",
)
def torch_dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    keep: int,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of each query to the `keep` keys of the largest bias, which is added to
    their scores.

    Args:
        query, key, value: as in `torch_attention`, layout bsnd; the last query meets the last key.
        key_bias: [batch, sk, kv_heads], or one for each of the query's heads.
        keep: keys that a query keeps; all of them when there are fewer.
        scale: as in `torch_attention`.
        sliding_window: keys, itself included, among which a query chooses; None: all up to it.

    Returns:
        [batch, sq, heads, value_dim].
    """
    sq, sk = query.shape[1], key.shape[1]
    last = torch.arange(sk - sq, sk, device=query.device).unsqueeze(1)
    return _attention(query, key, value, kept_bias(key_bias, last, keep, sliding_window), scale)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None
) -> Tensor:
    by_head = bias.repeat_interleave(query.shape[2] // bias.shape[1], dim=1)
    return torch_attention(query, key, value, by_head, 0.0, False, scale)


@register_op(
    _fake,
    mutates=("k_cache", "v_cache", "bias_cache"),
    cached_form_of="torch_dynamic_mask_attention",
)
def torch_cached_dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bias_cache: Tensor,
    keep: int,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """`torch_dynamic_mask_attention` of a flat row of tokens: store keys, values and biases, then
    attend over pages.

    Arguments are those of `torch_dynamic_mask_attention` with a batch of one row, then metadata and
    caches as in `torch_cached_attention`; `bias_cache` is [pages, heads, page_size, 1], with the
    heads of `key_bias`. A decode step reads nothing back.
    """
    caches = (k_cache, v_cache, bias_cache)
    for cache, tokens in zip(caches, (key[0], value[0], key_bias[0].unsqueeze(-1)), strict=True):
        write_tokens(cache, tokens, slot_mapping)
    sequences, _, longest_query, longest_kv, *_ = batch_info_host.tolist()
    if longest_query == 1:
        pages = block_table[:, : -(-longest_kv // k_cache.shape[2])]
        read = [cache[pages].transpose(2, 3).flatten(1, 2).to(query.dtype) for cache in caches]
        distance = kv_lens.unsqueeze(1) - 1 - torch.arange(read[0].shape[1], device=query.device)
        seen = (distance >= 0) & (distance < (sliding_window or read[0].shape[1]))
        keys, values, biases = (only_seen(stored, seen) for stored in read)
        bias = kept_bias(biases[..., 0], (kv_lens - 1).view(-1, 1, 1, 1), keep, sliding_window)
        return _attention(query[0].unsqueeze(1), keys, values, bias, scale).transpose(0, 1)
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    starts, lengths = cu_seqlens.tolist(), kv_lens.tolist()
    for index in range(sequences):
        rows = slice(starts[index], starts[index + 1])
        first = first_seen(lengths[index] - (rows.stop - rows.start), sliding_window)
        stored = (
            read_sequence(cache, block_table[index], lengths[index], first) for cache in caches
        )
        keys, values, biases = (each.transpose(1, 2).to(query.dtype) for each in stored)
        out[:, rows] = torch_dynamic_mask_attention(
            query[:, rows], keys, values, biases[..., 0], keep, scale, sliding_window
        )
    return out

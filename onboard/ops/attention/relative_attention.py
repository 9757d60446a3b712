"""Attention with a bias that each query brings for each distance, as it is and over a paged cache.

The bias of a key hangs on the query's hidden state and on how far back the key lies, as in
Transformer-XL (Dai et al. 2019, arXiv:1901.02860), but learned without keys of positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.attention.attention import torch_attention
from onboard.ops.attention.cached_attention import (
    first_seen,
    only_seen,
    read_sequence,
    write_tokens,
)
from onboard.ops.library import register_op


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def distance_bias(relative: Tensor, distance: Tensor) -> Tensor:
    """Return [batch, heads, queries, keys]: each query's number for each key's distance, 0 where it
    has none.

    Args:
        relative: [batch, queries, heads, extent].
        distance: [queries, keys] or [batch, queries, keys], query position - key position.
    """
    extent = relative.shape[-1]
    by_head = F.pad(relative, (0, 1)).transpose(1, 2)
    at = torch.where((distance < 0) | (distance >= extent), extent, distance)
    at = at.view(-1, 1, *at.shape[-2:]).expand(*by_head.shape[:3], -1)
    return by_head.gather(-1, at)


@register_op(
    _fake,
    carries_state=True,
    attends=True,
    described="Attention with a bias of relative positions",
)
def torch_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention whose scores get `relative[query, head, distance]`.

    Args:
        query, key, value: as in `torch_attention`, layout bsnd; the last query meets the last key.
        relative: [batch, sq, heads, extent], added to the scaled scores of the keys at distance 0,
            1, ...; keys further away get nothing added.
        scale, sinks, sliding_window: as in `torch_attention`.

    Returns:
        [batch, sq, heads, value_dim].
    """
    sq, sk = query.shape[1], key.shape[1]
    keys = torch.arange(sk, device=query.device)
    bias = distance_bias(relative, keys[sk - sq :].unsqueeze(1) - keys)
    return torch_attention(query, key, value, bias, 0.0, True, scale, sinks, sliding_window)


@register_op(_fake, mutates=("k_cache", "v_cache"), cached_form_of="torch_relative_attention")
def torch_cached_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """`torch_relative_attention` of a flat row of tokens: store their keys and values, then attend
    over the pages.

    Arguments are those of `torch_relative_attention` with a batch of one row, then metadata and
    caches as in `torch_cached_attention`. A decode step reads nothing back from the device.
    """
    write_tokens(k_cache, key[0], slot_mapping)
    write_tokens(v_cache, value[0], slot_mapping)
    sequences, _, longest_query, longest_kv, *_ = batch_info_host.tolist()
    if longest_query == 1:
        pages = block_table[:, : -(-longest_kv // k_cache.shape[2])]
        keys, values = (
            cache[pages].transpose(2, 3).flatten(1, 2).to(query.dtype)
            for cache in (k_cache, v_cache)
        )
        distance = (kv_lens - 1).view(-1, 1, 1) - torch.arange(keys.shape[1], device=query.device)
        seen = (distance >= 0) & (distance < (sliding_window or keys.shape[1]))
        keys, values = (only_seen(stored, seen[:, 0]) for stored in (keys, values))
        bias = distance_bias(relative[0].unsqueeze(1), distance).masked_fill(
            ~seen.unsqueeze(1), -torch.inf
        )
        sink = sinks[0].unsqueeze(1) if sinks is not None and sinks.dim() == 3 else sinks
        out = torch_attention(query[0].unsqueeze(1), keys, values, bias, 0.0, False, scale, sink)
        return out.transpose(0, 1)
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    starts, lengths = cu_seqlens.tolist(), kv_lens.tolist()
    for index in range(sequences):
        rows = slice(starts[index], starts[index + 1])
        first = first_seen(lengths[index] - (rows.stop - rows.start), sliding_window)
        stored = [
            read_sequence(cache, block_table[index], lengths[index], first)
            for cache in (k_cache, v_cache)
        ]
        keys, values = (each.transpose(1, 2).to(query.dtype) for each in stored)
        sink = sinks[:, rows] if sinks is not None and sinks.dim() == 3 else sinks
        out[:, rows] = torch_relative_attention(
            query[:, rows], keys, values, relative[:, rows], scale, sink, sliding_window
        )
    return out

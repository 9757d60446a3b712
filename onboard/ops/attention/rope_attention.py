"""Attention that rotates queries and keys itself, with or without a paged cache: the references."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onboard.ops.attention.attention import torch_attention
from onboard.ops.attention.cached_attention import torch_cached_attention
from onboard.ops.library import register_op
from onboard.ops.norm.norm import torch_rmsnorm
from onboard.ops.rope.turned_heads import TURNS

_Heads = Sequence[int] | None


def apart(
    query: Tensor, key: Tensor, value: Tensor, heads: _Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [batch, sequence, heads, dim]; with `heads` all three are one
    tensor, and these are views of it.
    """
    if heads is None:
        return query, key, value
    of_queries, of_keys, dim = heads
    sizes = [of_queries * dim, of_keys * dim]
    parts = torch.split(query, [*sizes, query.shape[-1] - sum(sizes)], dim=-1)
    q, k, v = (
        part.view(*part.shape[:-1], number, part.shape[-1] // number)
        for part, number in zip(parts, (of_queries, of_keys, of_keys), strict=True)
    )
    return q, k, v


def turned(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, turns: str, heads: _Heads,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return queries and keys that are normalised and rotated, and values, as attention takes them that
    does neither by itself; arguments are as in `torch_rope_attention`.
    """
    q, k, v = apart(query, key, value, heads)
    if q_norm is not None and k_norm is not None:
        q, k = torch_rmsnorm(q, q_norm, norm_eps), torch_rmsnorm(k, k_norm, norm_eps)
    q, k = TURNS[turns](q, k, cos, sin)
    return q, k, v


def _empty(
    query: Tensor, key: Tensor, value: Tensor, heads: _Heads, out_scale: Tensor | None
) -> Tensor:
    q, _, v = apart(query, key, value, heads)
    dtype = q.dtype if out_scale is None else torch.float8_e4m3fn
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


def _fake_rope_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    turns: str = "rope_cached",
    heads: list[int] | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    return _empty(query, key, value, heads, out_scale)


@register_op(
    _fake_rope_attention, inserted=True, attends=True, carries_state=True, rotary=("cos", "sin")
)
def torch_rope_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    turns: str = "rope_cached",
    heads: list[int] | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """Causal `torch_attention` in layout bsnd, of queries and keys that it normalises and rotates first.

    Args:
        query: [batch, sequence, heads, head_dim], not rotated; with `heads` [batch, sequence,
            (heads + kv_heads) * head_dim + kv_heads * value_dim], queries, keys and values in
            this order.
        key: [batch, sequence, kv_heads, head_dim], not rotated; with `heads` the same tensor.
        value: [batch, sequence, kv_heads, value_dim]; with `heads` the same tensor.
        cos, sin: [batch, sequence, size], size <= head_dim; for turns "rope_pairs" [batch, sequence,
            size / 2].
        turns: which channels turn together, a key of `onboard.ops.rope.turned_heads.TURNS`.
        heads: heads of queries, heads of keys and head_dim, where the three are one tensor.
        scale, sinks, sliding_window, logit_cap, alibi_slopes, chunk_size, k_scale, v_scale,
            out_scale: as in `torch_attention`.
        q_norm, k_norm: [head_dim], weights of RMSNorms of queries' and keys' heads before their
            rotation, in their dtype; both or neither.
        norm_eps: what these add to the mean square.

    Returns:
        [batch, sequence, heads, value_dim], as `torch_attention`.
    """
    q, k, v = turned(query, key, value, cos, sin, turns, heads, q_norm, k_norm, norm_eps)
    biases = "bsnd", alibi_slopes, chunk_size
    return torch_attention(
        q, k, v, None, 0.0, True, scale, sinks, sliding_window, logit_cap, *biases,
        k_scale, v_scale, out_scale,
    )  # fmt: skip


def fake_cached_rope_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    turns: str = "rope_cached",
    heads: list[int] | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """Return an empty output of `torch_cached_rope_attention`."""
    return _empty(query, key, value, heads, out_scale)


@register_op(
    fake_cached_rope_attention,
    mutates=("k_cache", "v_cache"),
    cached_form_of="torch_rope_attention",
    rotary=("cos", "sin"),
    no_capture="torch_cached_rope_attention reads lengths on the host (attn_backend triton does not)",
)
def torch_cached_rope_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    turns: str = "rope_cached",
    heads: list[int] | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """`torch_cached_attention` of queries and keys that it normalises and rotates first; so are keys that
    are stored.

    Args:
        query, key, value, cos, sin, turns, heads: as in `torch_rope_attention`, with a batch of one
            row.
        cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host: as in
            `torch_cached_attention`.
        k_cache: [pages, kv_heads, page_size, head_dim], written to; of any floating dtype.
        v_cache: [pages, kv_heads, page_size, value_dim], likewise.
        sinks, scale, sliding_window, logit_cap, alibi_slopes, chunk_size, k_scale, v_scale,
            out_scale: as in `torch_cached_attention`.
        q_norm, k_norm, norm_eps: as in `torch_rope_attention`.

    Returns:
        [1, tokens, heads, value_dim], as `torch_cached_attention`.
    """
    q, k, v = turned(query, key, value, cos, sin, turns, heads, q_norm, k_norm, norm_eps)
    metadata = cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host
    return torch_cached_attention(
        q, k, v, *metadata, k_cache, v_cache, sinks, scale, sliding_window, logit_cap, alibi_slopes,
        chunk_size, k_scale, v_scale, out_scale,
    )  # fmt: skip

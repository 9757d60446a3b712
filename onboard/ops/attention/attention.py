"""Attention without a cache (Vaswani et al. 2017, arXiv:1706.03762), with what checkpoints add to
it.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.attention.stored import as_cached, as_output, fake_output
from onboard.ops.library import register_op

SCORES_AT_ONCE = 1 << 26
"""Most attention scores that exist at a time (float32: 256 MiB); longer queries are worked off in
blocks of rows.
"""


def _fake_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: object, **keywords: object
) -> Tensor:
    return fake_output(query, value, rest, keywords, 13)


def _position_mask(
    query: Tensor, key: Tensor, is_causal: bool, sliding_window: int | None, chunk_size: int | None
) -> Tensor | None:
    """Return which keys each query may see, [sq, sk] bool, or None for all; the last query meets
    the last key.
    """
    sq, sk = query.shape[2], key.shape[2]
    if sq == 1 and sliding_window is None and chunk_size is None:
        return None  # the last query sees every key
    positions, keys = (
        torch.arange(sk - sq, sk, device=query.device).unsqueeze(1),
        torch.arange(sk, device=query.device),
    )
    parts = []
    if is_causal or sliding_window is not None:
        parts.append(positions >= keys)
    if sliding_window is not None:
        parts.append(positions - keys < sliding_window)
    if chunk_size is not None:
        parts.append(positions // chunk_size == keys // chunk_size)
    return reduce(Tensor.logical_and, parts) if parts else None


def _join_masks(attn_mask: Tensor | None, allowed: Tensor | None) -> Tensor | None:
    """Combine a caller's mask (bool: True = allowed, or added to the scores) with the mask from
    positions.
    """
    if attn_mask is None or allowed is None:
        return allowed if attn_mask is None else attn_mask
    if attn_mask.dtype == torch.bool:
        return attn_mask & allowed
    return attn_mask.masked_fill(~allowed, -torch.inf)


def _block_weights(scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
    """Softmax of masked scores [b, n, s, sk]; a sink [b or 1, n, s or 1, 1] adds to the denominator
    only.

    A row without keys is all zeros.
    """
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - peak).exp_()
    if sink is None:
        return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return weights / (weights.sum(-1, keepdim=True) + (sink - peak).exp())


def _sink(sinks: Tensor | None, rows: slice, dtype: torch.dtype) -> Tensor | None:
    """Return the sinks of some queries, [b or 1, n, s or 1, 1]."""
    if sinks is None:
        return None
    by_query = sinks.view(1, 1, -1) if sinks.dim() == 1 else sinks[:, rows]
    return by_query.to(dtype).transpose(1, 2).unsqueeze(-1)


def _alibi(slopes: Tensor, positions: Tensor, keys: int) -> Tensor:
    """Return slope * (key position - query position), [1, heads, queries, keys] float32 or
    wider.
    """
    distance = torch.arange(keys, device=slopes.device) - positions.unsqueeze(1)
    return slopes.to(torch.promote_types(slopes.dtype, torch.float32)).view(1, -1, 1, 1) * distance


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scale: float,
    sinks: Tensor | None,
    logit_cap: float | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Attention with its scores written out in float32 or wider, block of rows by block of rows;
    all tensors bnsd.
    """
    batch, heads, sq, dim = query.shape
    kv_heads, sk = key.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.to(wide).transpose(2, 3)
    block = max(1, SCORES_AT_ONCE // max(1, batch * heads * sk))
    out = query.new_empty((batch, heads, sq, value.shape[-1]))
    for start in range(0, sq, block):
        rows = query[:, :, start : start + block].to(wide)
        # The query heads of one key head become rows of one product, so keys and values are never
        # repeated.
        scores = (rows.reshape(batch, kv_heads, -1, dim) @ keys).view(batch, heads, -1, sk) * scale
        # Before the mask: tanh would make a forbidden -inf an allowed -cap.
        if logit_cap is not None:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        if alibi_slopes is not None:
            positions = torch.arange(sk - sq, sk, device=query.device)[start : start + block]
            scores = scores + _alibi(alibi_slopes, positions, sk)
        rows_mask = (
            mask if mask is None or mask.shape[-2] == 1 else mask[..., start : start + block, :]
        )
        sink = _sink(sinks, slice(start, start + block), scores.dtype)
        weights = F.dropout(
            _block_weights(scores, rows_mask, sink).to(query.dtype), dropout_p, dropout_p > 0
        )
        mixed = weights.reshape(batch, kv_heads, -1, sk) @ value
        out[:, :, start : start + block] = mixed.view(batch, heads, -1, value.shape[-1])
    return out


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Attention through PyTorch's fused kernels; all tensors bnsd."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.shape[2] == 1 and (mask is None or mask.shape[1] == 1) and not is_causal:
        # The query heads of one key head are rows of one product, which reads keys and values once.
        rows = query.reshape(key.shape[0], key.shape[1], -1, query.shape[-1])
        mixed = F.scaled_dot_product_attention(rows, key, value, mask, dropout_p, scale=scale)
        return mixed.reshape(*query.shape[:3], value.shape[-1])
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
    )


def _attention_bnsd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    sinks: Tensor | None,
    sliding_window: int | None,
    logit_cap: float | None,
    alibi_slopes: Tensor | None,
    chunk_size: int | None,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    plain = sinks is None and logit_cap is None and alibi_slopes is None
    anywhere = attn_mask is None and sliding_window is None and chunk_size is None
    if plain and is_causal and anywhere and query.shape[2] == key.shape[2]:
        return _plain_attention(query, key, value, None, dropout_p, True, scale)
    mask = _join_masks(attn_mask, _position_mask(query, key, is_causal, sliding_window, chunk_size))
    if plain:
        return _plain_attention(query, key, value, mask, dropout_p, False, scale)
    return _explicit_attention(
        query, key, value, mask, dropout_p, scale, sinks, logit_cap, alibi_slopes
    )


@register_op(_fake_attention, attends=True)
def torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    scale: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    layout: str = "bsnd",
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245); softmax in float32.

    Query i of sq sits at position sk - sq + i. A query that may see no key gives zeros.

    Args:
        query: [batch, sq, heads, head_dim] in layout bsnd, [batch, heads, sq, head_dim] in bnsd; so
            for key and value.
        key: [batch, sk, kv_heads, head_dim]; kv_heads divides heads.
        value: [batch, sk, kv_heads, value_dim].
        attn_mask: broadcasts to [batch, heads, sq, sk]; bool (True = allowed) or added to the
            scores.
        dropout_p: probability of dropping an attention weight.
        is_causal: a query sees keys up to its own position; joins with attn_mask.
        scale: factor of the scores; None: head_dim ** -0.5.
        sinks: [heads], one more logit per head, in the denominator only (gpt-oss); or one of each
            query, [batch, sq, heads].
        sliding_window: W; a key is seen iff 0 <= query position - key position < W.
        logit_cap: c; scores become c * tanh(score / c) before any mask (Gemma 2, arXiv:2408.00118).
        layout: "bsnd" or "bnsd".
        alibi_slopes: [heads]; slope * (key position - query position) is added to the scores, after
            the cap (ALiBi, Press et al. 2022, arXiv:2108.12409).
        chunk_size: C; a key is seen iff query position // C == key position // C (Llama 4).
        k_scale, v_scale: [1] or [kv_heads] float32; keys and values are rounded as a cache of
            float8_e4m3fn holds them, divided by it.
        out_scale: [1] float32; the result is rounded to float8_e4m3fn, divided by it.

    Returns:
        Like query, last dimension value_dim; with out_scale float8_e4m3fn.

    Raises:
        ValueError: unknown layout.
    """
    if layout not in ("bsnd", "bnsd"):
        raise ValueError(f"torch_attention: layout is {layout!r}; use 'bsnd' or 'bnsd'")
    options = (attn_mask, dropout_p, is_causal, scale, sinks, sliding_window, logit_cap)
    biases = (alibi_slopes, chunk_size)
    if layout == "bsnd":
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    key, value = as_cached(key, k_scale), as_cached(value, v_scale)
    mixed = as_output(_attention_bnsd(query, key, value, *options, *biases), out_scale)
    return (mixed if layout == "bnsd" else mixed.transpose(1, 2)).contiguous()


@register_op(_fake_attention, attends=True)
def torch_attention_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with its meaning of every argument, as
    one graph node.

    In particular is_causal aligns the first query with the first key, unlike `torch_attention`.

    Args:
        query: [batch, heads, sq, head_dim].
        key: [batch, kv_heads, sk, head_dim].
        value: [batch, kv_heads, sk, value_dim].
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as there.

    Returns:
        [batch, heads, sq, value_dim].
    """
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.contiguous()


@register_op()
def torch_attention_repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """Repeat each key or value head n_rep times in a row.

    Args:
        hidden_states: [batch, kv_heads, sequence, head_dim].
        n_rep: repetitions.

    Returns:
        [batch, kv_heads * n_rep, sequence, head_dim].
    """
    batch, kv_heads, length, dim = hidden_states.shape
    repeated = hidden_states.unsqueeze(2).expand(batch, kv_heads, n_rep, length, dim)
    return repeated.clone(memory_format=torch.contiguous_format).view(
        batch, kv_heads * n_rep, length, dim
    )

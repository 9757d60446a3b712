"""What functions of flash_attn and xformers compute in inference, as their documentation has it: in
plain torch, which modeling code could have itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Return attention of q [batch, queries, heads, size] to k and v [batch, keys, kv heads, size].

    The last query is as far as the last key; `window_size` are the keys before and behind it that
    a query sees, -1 for all.
    """
    seen = _seen(q.shape[1], k.shape[1], causal, window_size, q.device)
    groups = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keys, values = (item.repeat_interleave(groups, dim=2).transpose(1, 2) for item in (k, v))
    scores = torch.matmul(q.transpose(1, 2), keys.transpose(2, 3)) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + _alibi(alibi_slopes, q.shape[1], k.shape[1])
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if q.shape[1] > k.shape[1]:  # the first queries see no key
        weights = weights.nan_to_num(0.0)
    weights = weights.to(q.dtype)
    return torch.matmul(weights, values).transpose(1, 2)


def _seen(
    queries: int, keys: int, causal: bool, window: tuple[int, int], device: Any
) -> torch.Tensor:
    """Return which keys each query sees, [queries, keys]."""
    ends = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    distance = ends - torch.arange(keys, device=device)
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen = seen & (distance <= left)
    if right >= 0:
        seen = seen & (distance >= -right)
    return seen


def _alibi(slopes: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Return the bias of each head, [batch or 1, heads, queries, keys]."""
    ends = torch.arange(queries, device=slopes.device).unsqueeze(1) + (keys - queries)
    distance = (ends - torch.arange(keys, device=slopes.device)).abs()
    return -slopes.view(-1, slopes.shape[-1], 1, 1) * distance


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return attention of [batch, sequence, 3, heads, size]."""
    q, k, v = qkv.unbind(dim=2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return attention to keys and values in one, [batch, keys, 2, heads, size]."""
    k, v = kv.unbind(dim=2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **kwargs: Any,
) -> torch.Tensor:
    """Return attention within texts that lie one after the other, [tokens, heads, size]; the ends
    of each are in `cu_seqlens` [texts + 1].
    """
    texts = cu_seqlens_q.shape[0] - 1
    if q.shape[0] == texts * max_seqlen_q and k.shape[0] == texts * max_seqlen_k:  # of one length
        query = q.view(texts, max_seqlen_q, *q.shape[1:])
        key, value = (item.view(texts, max_seqlen_k, *item.shape[1:]) for item in (k, v))
        whole = flash_attn_func(
            query, key, value, 0.0, softmax_scale, causal, window_size, **kwargs
        )
        return whole.flatten(0, 1)
    ends = zip(
        *(
            each.tolist()
            for each in (cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:])
        ),
        strict=False,
    )
    settings = (0.0, softmax_scale, causal, window_size)
    parts = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], *settings, **kwargs)
        for a, b, c, d in ends
    ]
    return torch.cat(parts, dim=1)[0]


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return the tokens [tokens, ...] that a mask [batch, sequence] has, their places, the ends of
    the texts, the longest one's length.
    """
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten()).flatten()
    ends = nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, ends, int(lengths.max())


def get_unpad_data(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the places of the tokens that a mask [batch, sequence] has, the ends of the texts, the
    longest one's length.
    """
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    ends = nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return torch.nonzero(mask.flatten()).flatten(), ends, int(lengths.max())


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Return tokens at their places in [batch, seqlen, ...], zeros elsewhere."""
    whole = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    whole[indices] = hidden_states
    return whole.view(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows."""
    return hidden_states[indices]


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Return x [batch, sequence, heads, size] with its first channels turned by tables [sequence,
    turned / 2].
    """
    turned = 2 * cos.shape[-1]
    part, rest = x[..., :turned], x[..., turned:]
    cos, sin = (table[..., : x.shape[1], :].unsqueeze(-2) for table in (cos, sin))
    if interleaved:
        first, second = part[..., ::2], part[..., 1::2]
        pair = (first * cos - second * sin, first * sin + second * cos)
        return torch.cat((torch.stack(pair, dim=-1).flatten(-2), rest), dim=-1)
    first, second = part.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos, rest), dim=-1)


class LowerTriangularMask:
    """xformers' causal mask."""


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | LowerTriangularMask | None = None,
    p: float = 0.0,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return attention of [batch, sequence, heads, size] with a bias, a causal mask or none."""
    if isinstance(attn_bias, LowerTriangularMask):
        return flash_attn_func(query, key, value, 0.0, scale, True)
    if attn_bias is None:
        return flash_attn_func(query, key, value, 0.0, scale)
    size = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v = (item.transpose(1, 2) for item in (query, key, value))
    weights = torch.softmax(q @ k.transpose(2, 3) * size + attn_bias, dim=-1)
    return (weights @ v).transpose(1, 2)


FORMS: dict[str, Any] = {
    "flash_attn..flash_attn_func": flash_attn_func,
    "flash_attn..flash_attn_varlen_func": flash_attn_varlen_func,
    "flash_attn..flash_attn_unpadded_func": flash_attn_varlen_func,  # as version 1 has it
    "flash_attn..flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
    "flash_attn..flash_attn_kvpacked_func": flash_attn_kvpacked_func,
    "flash_attn..index_first_axis": index_first_axis,
    "flash_attn..pad_input": pad_input,
    "flash_attn..unpad_input": unpad_input,
    "flash_attn..apply_rotary_emb": apply_rotary_emb,
    "flash_attn..apply_rotary_emb_func": apply_rotary_emb,
    "xformers..memory_efficient_attention": memory_efficient_attention,
    "xformers..LowerTriangularMask": LowerTriangularMask,
}
"""Package and name -> what it computes; the modules between them differ from version to version."""

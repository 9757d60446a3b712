"""Attention to the keys that an indexer chose for each query (DeepSeek-V3.2, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.attention.attention import torch_attention
from onboard.ops.library import register_op


def chosen_keys(indices: Tensor, keys: int) -> Tensor:
    """Return which of `keys` keys a query may see, [batch, 1, sequence, keys] bool, from the ids of
    those chosen.

    The id -1 stands for none.
    """
    chosen = torch.zeros(*indices.shape[:-1], keys + 1, dtype=torch.bool, device=indices.device)
    return chosen.scatter(-1, indices.long() % (keys + 1), True)[..., :keys].unsqueeze(1)


def _fake_sparse_mla(
    q_nope: Tensor, q_pe: Tensor, compressed_kv: Tensor, kpe: Tensor, weight: Tensor, *_: object
) -> Tensor:
    batch, length, heads, nope = q_nope.shape
    return q_nope.new_empty((batch, length, heads, weight.shape[0] // heads - nope))


@register_op(
    _fake_sparse_mla,
    carries_state=True,
    attends=True,
    described="Multi-head latent attention to the keys that an indexer chose",
    hinted=True,
)
def torch_sparse_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    kv_b_proj_weight: Tensor,
    indices: Tensor | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal multi-head latent attention (see `torch_mla`) to some of the keys: chosen ones, or
    those near the query.

    Args:
        q_nope: [batch, sequence, heads, nope_dim], the part of the queries without positions.
        q_pe: [batch, sequence, heads, rope_dim], the rotated part.
        compressed_kv: [batch, keys, rank], normalised, not yet expanded; the last query meets the
            last key.
        kpe: [batch, keys, 1, rope_dim], rotated, the same for all heads.
        kv_b_proj_weight: [heads * (nope_dim + value_dim), rank].
        indices: [batch, sequence, top_k] integers, the chosen keys of each query; those behind it
            count for nothing, nor does -1. None: all are chosen.
        scale: factor of the scores; None: (nope_dim + rope_dim) ** -0.5.
        sinks: [heads], a logit of each head that takes weight and gives nothing.
        sliding_window: a query sees that many keys, itself the last.

    Returns:
        [batch, sequence, heads, value_dim] in the queries' dtype.
    """
    heads, nope = q_nope.shape[2:]
    expanded = F.linear(compressed_kv, kv_b_proj_weight).reshape(
        *compressed_kv.shape[:2], heads, -1
    )
    k_nope, value = expanded[..., :nope], expanded[..., nope:]
    key = torch.cat([k_nope, kpe.expand(-1, -1, heads, -1)], dim=-1)
    query = torch.cat([q_nope, q_pe], dim=-1)
    mask = None if indices is None else chosen_keys(indices, key.shape[1])
    return torch_attention(query, key, value, mask, 0.0, True, scale, sinks, sliding_window)

"""Multi-head latent attention without a cache (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.attention.attention import torch_attention
from onboard.ops.attention.stored import as_cached
from onboard.ops.library import register_op


def fake_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    weight: Tensor,
    *_: object,
    **__: object,
) -> Tensor:
    """Return an empty output of `torch_mla`: [batch, sequence, heads, value_dim]."""
    batch, length, heads, nope = q_nope.shape
    return q_nope.new_empty((batch, length, heads, weight.shape[0] // heads - nope))


@register_op(
    fake_mla, carries_state=True, attends=True, described="Multi-head latent attention", hinted=True
)
def torch_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    kv_b_proj_weight: Tensor,
    is_causal: bool = True,
    scale: float | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """Attention whose keys and values are expanded from one latent vector a token.

    Keys are [W_k latent, kpe] and values W_v latent, where kv_b_proj_weight holds, head after head,
    the rows of W_k and then those of W_v. Keeping the latent whole lets a cached form store it
    alone and absorb the weight.

    Args:
        q_nope: [batch, sequence, heads, nope_dim], the part of the queries without positions.
        q_pe: [batch, sequence, heads, rope_dim], the rotated part.
        compressed_kv: [batch, sequence, rank], normalised, not yet expanded.
        kpe: [batch, sequence, 1, rope_dim], rotated, the same for all heads.
        kv_b_proj_weight: [heads * (nope_dim + value_dim), rank].
        is_causal: a query sees keys up to its own position.
        scale: factor of the scores; None: (nope_dim + rope_dim) ** -0.5.
        k_scale: [1] float32; latents and keys are rounded as a cache of float8_e4m3fn holds them,
            divided by it.

    Returns:
        [batch, sequence, heads, value_dim] in the queries' dtype.
    """
    heads, nope = q_nope.shape[2:]
    compressed_kv, kpe = as_cached(compressed_kv, k_scale), as_cached(kpe, k_scale)
    expanded = F.linear(compressed_kv, kv_b_proj_weight).reshape(
        *compressed_kv.shape[:2], heads, -1
    )
    k_nope, value = expanded[..., :nope], expanded[..., nope:]
    key = torch.cat([k_nope, kpe.expand(-1, -1, heads, -1)], dim=-1)
    return torch_attention(
        torch.cat([q_nope, q_pe], dim=-1), key, value, None, 0.0, is_causal, scale
    )

"""Latent attention that rotates its queries' and keys' parts with positions itself, with or without
a paged cache: the references.
"""

from __future__ import annotations

from torch import Tensor

from onboard.ops.latent_attention.cached_mla import torch_cached_mla
from onboard.ops.latent_attention.mla import fake_mla, torch_mla
from onboard.ops.library import register_op
from onboard.ops.rope.turned_heads import TURNS


@register_op(fake_mla, inserted=True, attends=True, carries_state=True, rotary=("cos", "sin"))
def torch_rope_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    kv_b_proj_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    turns: str = "rope_cached",
    scale: float | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """Causal `torch_mla` of `q_pe` and `kpe` that it rotates first.

    Args:
        q_nope, compressed_kv, kv_b_proj_weight, scale, k_scale: as in `torch_mla`.
        q_pe: [batch, sequence, heads, rope_dim], not rotated.
        kpe: [batch, sequence, 1, rope_dim], not rotated.
        cos, sin, turns: as in `torch_rope_attention`.

    Returns:
        [batch, sequence, heads, value_dim] in the queries' dtype.
    """
    q_pe, kpe = TURNS[turns](q_pe, kpe, cos, sin)
    return torch_mla(q_nope, q_pe, compressed_kv, kpe, kv_b_proj_weight, True, scale, k_scale)


@register_op(
    fake_mla, mutates=("mla_cache",), cached_form_of="torch_rope_mla", rotary=("cos", "sin")
)
def torch_cached_rope_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    kv_b_proj_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    mla_cache: Tensor,
    turns: str = "rope_cached",
    scale: float | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """`torch_cached_mla` of `q_pe` and `kpe` that it rotates first; keys are stored rotated.

    Args:
        q_nope, q_pe, compressed_kv, kpe, kv_b_proj_weight, cos, sin, turns: as in
            `torch_rope_mla`, with a batch of one row.
        cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host, scale, k_scale: as in
            `torch_cached_mla`.
        mla_cache: [pages, 1, page_size, rank + rope_dim], written to.

    Returns:
        [1, tokens, heads, value_dim], as `torch_cached_mla`.
    """
    q_pe, kpe = TURNS[turns](q_pe, kpe, cos, sin)
    metadata = cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host
    tensors = q_nope, q_pe, compressed_kv, kpe, kv_b_proj_weight
    return torch_cached_mla(*tensors, *metadata, mla_cache, scale, k_scale)

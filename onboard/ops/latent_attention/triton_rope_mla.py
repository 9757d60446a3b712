"""Latent attention over a paged cache that rotates queries and keys itself: how its kernels are
launched.
"""

from __future__ import annotations

from torch import Tensor

from onboard.ops.attention.rotation_kernels import Rotation
from onboard.ops.latent_attention.mla import fake_mla
from onboard.ops.latent_attention.triton_cached_mla import attend_latents
from onboard.ops.library import register_op


@register_op(fake_mla, mutates=("mla_cache",), rotary=("cos", "sin"), any_lengths=True)
def triton_cached_rope_mla(
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
    """`torch_cached_rope_mla` as kernels: in decode attention rotates what it loads, else the
    rotation's kernel comes first.
    """
    metadata = cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host
    tensors = q_nope, q_pe, compressed_kv, kpe, kv_b_proj_weight
    rotation = Rotation(cos, sin, turns)
    return attend_latents(*tensors, *metadata, mla_cache, scale, k_scale, rotation)

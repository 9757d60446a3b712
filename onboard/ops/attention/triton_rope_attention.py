"""Attention over a paged cache that rotates queries and keys itself: how its kernels are launched."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onboard.ops.attention.rope_attention import (
    apart,
    fake_cached_rope_attention,
    torch_cached_rope_attention,
)
from onboard.ops.attention.rotation_kernels import HeadNorms, Rotation
from onboard.ops.attention.triton_cached_attention import attend
from onboard.ops.library import register_op, schema_of

_SCHEMA = schema_of(torch_cached_rope_attention.__name__)


@register_op(
    fake_cached_rope_attention,
    mutates=("k_cache", "v_cache"),
    schema=_SCHEMA,
    any_lengths=True,
    rotary=("cos", "sin"),
)
def triton_cached_rope_attention(*arguments: Any, **keywords: Any) -> Tensor:
    """`torch_cached_rope_attention` as kernels: in decode attention rotates what it loads, with one
    launch less than `triton_cached_attention` behind a rotation; else the rotation comes first.
    """
    return _attend(False, *arguments, **keywords)


@register_op(
    fake_cached_rope_attention,
    mutates=("k_cache", "v_cache"),
    schema=_SCHEMA,
    any_lengths=True,
    rotary=("cos", "sin"),
    invariant_form_of="triton_cached_rope_attention",
)
def invariant_cached_rope_attention(*arguments: Any, **keywords: Any) -> Tensor:
    """`invariant_cached_attention` behind the rotation's kernel, which is row-wise."""
    return _attend(True, *arguments, **keywords)


def _attend(
    invariant: bool, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor,
    kv_lens: Tensor, block_table: Tensor, slot_mapping: Tensor, batch_info_host: Tensor, k_cache: Tensor,
    v_cache: Tensor, turns: str = "rope_cached", heads: list[int] | None = None, sinks: Tensor | None = None,
    scale: float | None = None, sliding_window: int | None = None, logit_cap: float | None = None,
    alibi_slopes: Tensor | None = None, chunk_size: int | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, out_scale: Tensor | None = None, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, norm_eps: float = 0.0,
) -> Tensor:  # fmt: skip
    q, k, v = apart(query, key, value, heads)
    metadata = cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host
    norms = None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, norm_eps)
    return attend(
        invariant, q, k, v, *metadata, k_cache, v_cache, sinks, scale, sliding_window, logit_cap, alibi_slopes,
        chunk_size, k_scale, v_scale, out_scale, Rotation(cos, sin, turns, norms),
    )  # fmt: skip

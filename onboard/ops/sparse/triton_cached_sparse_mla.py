"""Latent attention to chosen keys over a paged cache of latents: how its kernels are launched.

Nothing waits for the device, and in decode every grid follows from shapes alone.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from onboard.ops.latent_attention.triton_cached_mla import (
    absorb_keys,
    expand_values,
    tile_sizes,
    write_latents,
)
from onboard.ops.library import register_op
from onboard.ops.sparse.cached_sparse import fake_cached_sparse_mla
from onboard.ops.sparse.sparse_mla_kernels import join_kernel, sparse_mla_kernel
from onboard.ops.triton.launch import (
    dot_type,
    last_contiguous,
    overlaps,
    processors,
    require_device,
    splits_for,
    tile_width,
)
from onboard.ops.triton.ragged_blocks import most_blocks

MOST_SPLITS = 32
JOINED_CHANNELS = 128
"""What one warp joins: programs so small that many run at a time."""


@register_op(fake_cached_sparse_mla, mutates=("mla_cache",))
def triton_cached_sparse_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    kv_b_proj_weight: Tensor,
    indices: Tensor | None,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    mla_cache: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """`torch_cached_sparse_mla` as kernels, with the weight absorbed in all steps: each token reads
    its own latents alone.
    """
    require_device(q_nope)
    latent, key = last_contiguous(compressed_kv)[0], last_contiguous(kpe)[0, :, 0]
    write_latents(latent, key, slot_mapping, mla_cache, None)
    queries = absorb_keys(q_nope, kv_b_proj_weight)
    factor = (q_nope.shape[-1] + q_pe.shape[-1]) ** -0.5 if scale is None else scale
    spans = (cu_seqlens, kv_lens, block_table)
    chosen = None if indices is None else last_contiguous(indices)[0]
    mixed = _attend(
        queries, last_contiguous(q_pe)[0], chosen, spans, batch_info_host, mla_cache, factor, sinks,
        sliding_window or 0,
    )  # fmt: skip
    return expand_values(mixed, kv_b_proj_weight, q_nope.shape[-1])


def _attend(
    queries: Tensor,
    rotated: Tensor,
    chosen: Tensor | None,
    spans: tuple[Tensor, Tensor, Tensor],
    batch_info_host: Tensor,
    cache: Tensor,
    scale: float,
    sinks: Tensor | None,
    window: int,
) -> Tensor:
    """Mix the latents that each query and head sees: [tokens, heads, rank], zeros for tokens of no
    sequence.
    """
    (tokens, heads, rank), rope, page_size = queries.shape, rotated.shape[-1], cache.shape[2]
    sequences, real, longest_query, *_ = batch_info_host.tolist()
    decode = longest_query == 1
    tile, width, stages = tile_sizes(queries, rope, heads)
    blocks = triton.cdiv(heads, tile)
    top_k = 0 if chosen is None else chosen.shape[1]
    most = top_k or min(window or 2**31, spans[2].shape[1] * page_size)
    wanted = processors(queries.device) // (blocks * sequences) if decode else 1
    splits = splits_for(wanted, most, width, MOST_SPLITS)
    new = queries.new_empty if decode and tokens == sequences else queries.new_zeros
    out = parts = lse = new((tokens, heads, rank))
    if splits > 1:
        parts = queries.new_empty((tokens, heads, splits, rank), dtype=torch.float32)
        lse = queries.new_empty((tokens, heads, splits), dtype=torch.float32)
    rows = sequences if decode else most_blocks(real, sequences, 1, 1)
    sparse_mla_kernel[(rows, blocks, splits)](
        parts, lse, queries, rotated, chosen, *spans, cache, sinks, scale, sequences,
        *queries.stride()[:2], *rotated.stride()[:2], 0 if chosen is None else chosen.stride(0),
        spans[2].stride(0), cache.stride(0), cache.stride(2),
        HEADS=heads, RANK=rank, ROPE=rope, PAGE=page_size, TOP_K=top_k, WINDOW=window, SPLITS=splits,
        HAS_SINKS=sinks is not None, DECODE=decode, DOT_TYPE=dot_type(queries.dtype),
        BLOCK_M=tile, BLOCK_N=width, BLOCK_RANK=tile_width(rank), BLOCK_ROPE=tile_width(rope),
        num_warps=4 if tile == 16 else 8, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        channels = min(JOINED_CHANNELS, tile_width(rank))
        join_kernel[(sequences, heads, triton.cdiv(rank, channels))](
            out, parts, lse, sinks, HEADS=heads, RANK=rank, SPLITS=splits,
            HAS_SINKS=sinks is not None, BLOCK_RANK=channels, num_warps=1, **overlaps(queries.device),
        )  # fmt: skip
    return out

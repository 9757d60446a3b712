"""Decode steps of latent attention on Hopper GPUs: how their kernels are launched."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from onboard.ops.attention.rotation_kernels import Rotation, decoding_rotation
from onboard.ops.latent_attention.absorb_kernels import absorb_kernel
from onboard.ops.latent_attention.triton_joined_parts import MOST_SPLITS, join_parts
from onboard.ops.triton.launch import (
    dot_type,
    last_contiguous,
    overlaps,
    power_of_two,
    processors,
    runs_hopper_code,
    splits_for,
    tile_width,
)

ROWS, KEYS = 64, 64
"""Of a tile: two of keys and one of queries are all that shared memory holds."""
TOKENS, CHANNELS = 64, 128
"""Most of a tile of the kernel in front."""
_RANKS, _ROPES = (128, 256, 512), (16, 32, 64)
"""Sizes of latents and of what has positions that the kernel's tiles have."""
_FEWEST_HEADS = 17
"""Fewer fill so little of a tile that the narrow one of `mla_kernel` is quicker."""


def suits(q_nope: Tensor, q_pe: Tensor, latents: Tensor, cache: Tensor) -> bool:
    """Whether the kernel computes a decode step of these, with queries [1, tokens, heads, channels] and
    latents [1, tokens, rank]: on Hopper GPUs, in one 16-bit dtype.
    """
    return (
        runs_hopper_code(q_nope.device)
        and cache.dtype == q_nope.dtype
        and cache.dtype in (torch.bfloat16, torch.float16)
        and q_nope.shape[2] >= _FEWEST_HEADS
        and latents.shape[-1] in _RANKS
        and q_pe.shape[-1] in _ROPES
    )


def attend_decoding(
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    key: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    sequences: int,
    cache: Tensor,
    scale: float,
    rotation: Rotation | None,
) -> Tensor:
    """Store the new latents and keys, then mix the latents that each query and head sees.

    Args:
        q_nope, q_pe: [tokens, heads, nope] and [tokens, heads, rope].
        latent, key: [tokens, rank] and [tokens, rope].
        weight: [heads * (nope + value), rank], which is absorbed into the queries.
        cu_seqlens, kv_lens, block_table, slot_mapping, cache, rotation: as of `triton_cached_mla`.
        sequences: how many there are, of one token each at most.
        scale: factor of the scores.

    Returns:
        [tokens, heads, rank]; zeros for tokens beyond the last sequence.
    """
    queries = absorbed_queries(q_nope, q_pe, latent, key, weight, slot_mapping, cache, rotation)
    tokens, heads, _ = queries.shape
    rank, page_size = latent.shape[-1], cache.shape[2]
    blocks = triton.cdiv(heads, ROWS)
    wanted = processors(queries.device) // (blocks * sequences)
    splits = splits_for(wanted, block_table.shape[1] * page_size, KEYS, MOST_SPLITS)
    new = queries.new_empty if tokens == sequences else queries.new_zeros
    out = parts = lse = new((tokens, heads, rank))
    if splits > 1:
        parts = queries.new_empty((tokens, heads, splits, rank), dtype=torch.float32)
        lse = queries.new_empty((tokens, heads, splits), dtype=torch.float32)
    _launch(
        (blocks, splits, sequences),
        parts,
        lse,
        queries,
        cu_seqlens,
        kv_lens,
        block_table,
        cache,
        rank,
        scale,
    )
    if splits > 1:
        join_parts(out, parts, lse, cu_seqlens, kv_lens, sequences, KEYS)
    return out


def absorbed_queries(
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    key: Tensor,
    weight: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    rotation: Rotation | None,
) -> Tensor:
    """Store the new latents and keys, these rotated, and return queries [tokens, heads, rank + rope]:
    of latents, and rotated.
    """
    (tokens, heads, nope), rope, rank = q_nope.shape, q_pe.shape[-1], latent.shape[-1]
    q_nope, q_pe, latent, key = map(last_contiguous, (q_nope, q_pe, latent, key))
    queries = q_nope.new_empty((tokens, heads, rank + rope))
    tile, part = min(TOKENS, tile_width(tokens)), min(CHANNELS, tile_width(rank))
    tables, steps, turning = decoding_rotation(rotation)
    grid = heads, triton.cdiv(rank, part), triton.cdiv(tokens, tile)
    absorb_kernel[grid](
        queries, q_nope, q_pe, weight, latent, key, slot_mapping, cache, *tables, tokens, *q_nope.stride()[:2],
        *q_pe.stride()[:2], weight.shape[0] // heads * rank, latent.stride(0), key.stride(0), *steps, cache.stride(0),
        cache.stride(2), HEADS=heads, NOPE=nope, RANK=rank, ROPE=rope, PAGE=cache.shape[2],
        DOT_TYPE=dot_type(queries.dtype), BLOCK_M=tile, BLOCK_NOPE=tile_width(nope), BLOCK_PART=part,
        BLOCK_RANK=tile_width(rank), BLOCK_ROPE=power_of_two(rope), **turning, num_warps=4, **overlaps(queries.device),
    )  # fmt: skip
    return queries


def _launch(
    grid: tuple[int, int, int],
    parts: Tensor,
    lse: Tensor,
    queries: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    cache: Tensor,
    rank: int,
    scale: float,
) -> None:
    # Where it runs, and nowhere else, Gluon is asked for
    from onboard.ops.latent_attention.hopper_mla_kernels import hopper_mla_kernel

    _, heads, channels = queries.shape
    hopper_mla_kernel[grid](
        parts, lse, queries, cu_seqlens, kv_lens, block_table, cache, scale, *queries.stride()[:2],
        block_table.stride(0), cache.stride(0), cache.stride(2),
        HEADS=heads, RANK=rank, ROPE=channels - rank, PAGE=cache.shape[2], SPLIT=grid[1] > 1, ROWS=ROWS, KEYS=KEYS,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip

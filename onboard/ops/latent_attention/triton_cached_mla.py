"""Multi-head latent attention over a paged cache of latents: how its kernels are launched.

All steps attend to the latents themselves; the weight that would expand them is absorbed into
queries and outputs by two batched matrix products of the library. Nothing waits for the device, and
in decode every grid follows from shapes alone, else from the numbers of tokens and sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from onboard.ops.attention.attention_kernels import write_cache_kernel
from onboard.ops.attention.rotation_kernels import Rotation, decoding_rotation
from onboard.ops.latent_attention.mla import fake_mla
from onboard.ops.latent_attention.mla_kernels import mla_kernel
from onboard.ops.latent_attention.triton_hopper_mla import attend_decoding, suits
from onboard.ops.latent_attention.triton_joined_parts import MOST_SPLITS, join_parts
from onboard.ops.library import register_op
from onboard.ops.rope.triton_rope import turn_heads
from onboard.ops.triton.launch import (
    dot_type,
    last_contiguous,
    overlaps,
    processors,
    require_device,
    shared_memory,
    splits_for,
    tile_width,
)
from onboard.ops.triton.ragged_blocks import most_blocks

ROWS, KEYS = 64, 64
"""Of the widest tile: what the accumulators leave of the registers, and what two buffers leave of
shared memory.
"""


@dataclass(frozen=True)
class _Plan:
    """How one call is dealt out to programs."""

    decode: bool
    rows: int
    """Rows of a tile: pairs of a query and a head."""
    keys: int
    grid: tuple[int, int, int]
    """Blocks, shares of keys and sequences in decode, else the blocks of all sequences together."""
    splits: int
    num_warps: int
    num_stages: int


def _buffers(memory: int, channels: int) -> int:
    """Return how many tiles of keys the shared memory holds beside queries and weights, all in
    16-bit types.
    """
    return (memory // 2 - ROWS * (channels + KEYS)) // (KEYS * channels)


def tile_sizes(queries: Tensor, rope: int, rows: int) -> tuple[int, int, int]:
    """Return rows and keys of tiles, and stages of loads, that fit in the registers and the shared
    memory of a multiprocessor, for queries [tokens, heads, rank].

    With 64 rows there is one program a multiprocessor (of compute capability 9.0), which loads a
    tile of keys while it computes with the one before, where both fit; a tile of 16 rows leaves
    room for two programs.
    """
    channels = tile_width(queries.shape[2]) + tile_width(rope)
    buffers = _buffers(shared_memory(queries.device), channels)
    if queries.dtype == torch.float32:  # products of float32 proper run outside the matrix units
        return 16, 16, 2
    if tile_width(rows) > 16 and buffers >= 1:
        return min(ROWS, tile_width(rows)), KEYS, min(2, buffers)
    return 16, 32, 3 if buffers >= 1 else 2


def _plan(queries: Tensor, rope: int, most_keys: int, counts: tuple[int, int, int]) -> _Plan:
    """Deal the rows of all sequences out to programs."""
    sequences, tokens, longest_query = counts
    heads = queries.shape[1]
    rows = longest_query * heads
    tile, keys, stages = tile_sizes(queries, rope, rows)
    warps = 4 if tile == 16 else 8
    if longest_query != 1:
        blocks = most_blocks(tokens, sequences, heads, tile)
        return _Plan(False, tile, keys, (blocks, 1, 1), 1, warps, stages)
    blocks = triton.cdiv(rows, tile)
    wanted = processors(queries.device) * (2 if tile == 16 else 1) // (blocks * sequences)
    splits = splits_for(wanted, most_keys, keys, MOST_SPLITS)
    return _Plan(True, tile, keys, (blocks, splits, sequences), splits, warps, stages)


@register_op(fake_mla, mutates=("mla_cache",), any_lengths=True)
def triton_cached_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    kv_b_proj_weight: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    mla_cache: Tensor,
    scale: float | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """`torch_cached_mla` as kernels: one or two launches between two batched matrix products in
    decode.

    `batch_info_host` says which kernels run: a captured decode step may be replayed for the same
        number of sequences.
    """
    metadata = cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host
    tensors = q_nope, q_pe, compressed_kv, kpe, kv_b_proj_weight
    return attend_latents(*tensors, *metadata, mla_cache, scale, k_scale, None)


def attend_latents(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    kv_b_proj_weight: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    mla_cache: Tensor,
    scale: float | None,
    k_scale: Tensor | None,
    rotation: Rotation | None,
) -> Tensor:
    """Return what `triton_cached_mla` does, in decode with a rotation that the kernel does while it
    loads, else behind one.
    """
    require_device(q_nope)
    sequences, _, longest_query, *_ = batch_info_host.tolist()
    factor = (q_nope.shape[-1] + q_pe.shape[-1]) ** -0.5 if scale is None else scale
    step = cu_seqlens, kv_lens, block_table, slot_mapping
    if longest_query == 1 and k_scale is None and suits(q_nope, q_pe, compressed_kv, mla_cache):
        mixed = attend_decoding(
            q_nope[0], q_pe[0], compressed_kv[0], kpe[0, :, 0], kv_b_proj_weight, *step, sequences, mla_cache,
            factor, rotation,
        )  # fmt: skip
        return expand_values(mixed, kv_b_proj_weight, q_nope.shape[-1])
    if rotation is not None and longest_query > 1:
        q_pe, kpe = turn_heads(q_pe, kpe, *rotation)
        rotation = None
    queries = absorb_keys(q_nope, kv_b_proj_weight)
    mixed = _attend(
        queries, last_contiguous(q_pe)[0], last_contiguous(compressed_kv)[0], last_contiguous(kpe)[0, :, 0],
        *step, batch_info_host, mla_cache, factor, k_scale, rotation,
    )  # fmt: skip
    return expand_values(mixed, kv_b_proj_weight, q_nope.shape[-1])


def _attend(
    queries: Tensor,
    rotated: Tensor,
    latent: Tensor,
    key: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    cache: Tensor,
    scale: float,
    k_scale: Tensor | None,
    rotation: Rotation | None,
) -> Tensor:
    """Store the new latents and keys, then mix the latents that each query and head sees: [tokens,
    heads, rank].
    """
    (tokens, heads, rank), rope, page_size = queries.shape, key.shape[-1], cache.shape[2]
    sequences, real, longest_query, *_ = batch_info_host.tolist()
    counts = sequences, real, longest_query
    plan = _plan(queries, rope, block_table.shape[1] * page_size, counts)
    # Rows that no sequence owns must be zeros; a decode batch has none, it is padded with whole
    # sequences.
    new = queries.new_empty if plan.decode and tokens == sequences else queries.new_zeros
    out = parts = lse = new((tokens, heads, rank))
    if not plan.decode:
        write_latents(latent, key, slot_mapping, cache, k_scale)
    if plan.splits > 1:
        parts = queries.new_empty((tokens, heads, plan.splits, rank), dtype=torch.float32)
        lse = queries.new_empty((tokens, heads, plan.splits), dtype=torch.float32)
    tables, steps, turning = decoding_rotation(rotation)
    mla_kernel[plan.grid](
        parts, lse, queries, rotated, latent, key, cu_seqlens, kv_lens, block_table, slot_mapping, cache,
        k_scale, *tables, scale, sequences, *steps, *queries.stride()[:2], *rotated.stride()[:2], latent.stride(0),
        key.stride(0), block_table.stride(0), cache.stride(0), cache.stride(2),
        HEADS=heads, RANK=rank, ROPE=rope, PAGE=page_size, SPLIT=plan.splits > 1, WRITE=plan.decode,
        HAS_SCALE=k_scale is not None,
        DOT_TYPE=dot_type(queries.dtype), EARLY=plan.splits > 1 and overlaps(queries.device)["OVERLAP"],
        BLOCK_M=plan.rows, BLOCK_N=plan.keys, BLOCK_RANK=tile_width(rank), BLOCK_ROPE=tile_width(rope),
        **turning, num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if plan.splits > 1:
        join_parts(out, parts, lse, cu_seqlens, kv_lens, sequences, plan.keys)
    return out


def write_latents(
    latent: Tensor, key: Tensor, slot_mapping: Tensor, cache: Tensor, k_scale: Tensor | None
) -> None:
    """Store latents and keys side by side, each as if it were a head."""
    rank, rope = latent.shape[-1], key.shape[-1]
    latents, keys = cache[..., :rank], cache[..., rank:]
    write_cache_kernel[(len(slot_mapping),)](
        latent, key, latents, keys, slot_mapping, k_scale, k_scale, latent.stride(0), 0, key.stride(0), 0,
        *latents.stride()[:3], *keys.stride()[:3],
        KV_HEADS=1, DIM=rank, VALUE_DIM=rope, PAGE=cache.shape[2],
        BLOCK_KEY=tile_width(rank), BLOCK_VALUE=tile_width(rope), SCALES=None if k_scale is None else 1,
    )  # fmt: skip


def absorb_keys(q_nope: Tensor, kv_b_proj_weight: Tensor) -> Tensor:
    """Return queries [tokens, heads, rank], whose products with latents are those of q_nope
    [1, tokens, heads, nope] with the keys that the weight [heads * (nope + value), rank] would
    expand.
    """
    heads, nope = q_nope.shape[2:]
    by_head = kv_b_proj_weight.view(heads, -1, kv_b_proj_weight.shape[-1])
    return torch.bmm(q_nope[0].transpose(0, 1), by_head[:, :nope]).transpose(0, 1)


def expand_values(mixed: Tensor, kv_b_proj_weight: Tensor, nope: int) -> Tensor:
    """Return the values [1, tokens, heads, value] of mixed latents [tokens, heads, rank], which the
    weight's rows behind the first `nope` of each head expand.
    """
    tokens, heads, rank = mixed.shape
    by_head = kv_b_proj_weight.view(heads, -1, rank)[:, nope:]
    out = mixed.new_empty((1, tokens, heads, by_head.shape[1]))
    torch.bmm(mixed.transpose(0, 1), by_head.transpose(1, 2), out=out[0].transpose(0, 1))
    return out

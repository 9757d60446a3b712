"""Attention over a paged key-value cache: how the kernels are launched.

Nothing here waits for the device, and in decode every grid follows from shapes alone: a step can be
captured as a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from onboard.ops.attention.attention_kernels import (
    attention_kernel,
    combine_kernel,
    write_cache_kernel,
)
from onboard.ops.attention.cached_attention import fake_cached_attention, torch_cached_attention
from onboard.ops.attention.cuda_decode_attention import (
    Scores,
    Sequences,
    decode_attention,
    suits_one_launch,
)
from onboard.ops.attention.dense_prefill import attend_whole_prompts, takes_whole_prompts
from onboard.ops.attention.rotation_kernels import Rotation, decoding_rotation
from onboard.ops.attention.stored import as_output
from onboard.ops.library import register_op, schema_of
from onboard.ops.result_places import output_rows
from onboard.ops.rope.triton_rope import turn_heads
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

MOST_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4
"""Decode programs for each multiprocessor: enough loads in flight, and sequences of unlike lengths
even out.
"""
HALVED = {1: (64, 2), 2: (64, 4), 4: (128, 2), 8: (64, 3), 16: (64, 3)}
"""Shares of a sequence's keys of which half as many take less time, with so many keys a tile and so
many stages of loads; measured on compute capability 9.0 with 2 to 8 key heads of 128 channels, 4 or 8
query heads on each, and 8 to 64 sequences.
"""
INVARIANT_ROWS = 64
"""Rows of every tile where results may not depend on the batch: the fewest that use the same
instruction as more do.
"""

FEW_ROWS, BLOCKS_PER_SEQUENCE = 64, 8
"""Rows of a tile, of at most 128 channels, in a step that has not as many blocks of twice those rows
for each sequence: most of a block's rows would be no one's where its sequence decodes. Measured on
compute capability 9.0 with 32 heads on 8 of 128 channels.
"""


@dataclass(frozen=True)
class _Tiles:
    """Tile sizes and launch options of one call."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _fitting(channels: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the most rows of a tile, its keys and the stages of loads that fit in the registers and
    the 227 KiB of shared memory of compute capability 9.0.
    """
    # Products of float32 proper run outside the matrix units, on operands in registers
    if dtype == torch.float32:
        return 32, 16, 2
    if channels <= 128:
        return 128, 32, 4
    return (128, 32, 3) if channels <= 256 else (64, 16, 2)


def _warps(rows: int, channels: int, dtype: torch.dtype) -> int:
    crowded = rows > 64 or dtype == torch.float32 or (channels > 128 and rows > 16)
    return 8 if crowded else 4


def _prefill_tiles(rows: int, channels: int, dtype: torch.dtype, bounded: bool) -> _Tiles:
    """Tiles for `rows` rows, which see few keys each where they are `bounded`."""
    most_rows, keys, stages = _fitting(channels, dtype)
    if dtype != torch.float32 and channels <= 128:
        keys, stages = (128, 2) if rows > FEW_ROWS and not bounded else (64, 3)
    tile = min(most_rows, tile_width(rows))
    return _Tiles(tile, keys, _warps(tile, channels, dtype), stages)


def _decode_tiles(
    rows: int, channels: int, dtype: torch.dtype, most_keys: int, wanted: int
) -> tuple[_Tiles, int]:
    """Tiles for the `rows` rows of a key head, and the shares of at most `most_keys` keys, for about
    `wanted` programs a key head.
    """
    most_rows, keys, stages = _fitting(channels, dtype)
    tile = min(most_rows, tile_width(rows))
    splits = splits_for(wanted // triton.cdiv(rows, tile), most_keys, keys, MOST_SPLITS)
    if splits in HALVED and tile == 16 and dtype != torch.float32 and channels <= 128:
        keys, stages = HALVED[splits]
        splits = max(1, splits // 2)
    return _Tiles(tile, keys, _warps(tile, channels, dtype), stages), splits


def _write(
    key: Tensor, value: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> None:  # fmt: skip
    kv_heads, dim, value_dim = key.shape[1], key.shape[2], value.shape[2]
    write_cache_kernel[(len(slot_mapping),)](
        key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, *key.stride()[:2], *value.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim, PAGE=k_cache.shape[2],
        BLOCK_KEY=tile_width(kv_heads * dim), BLOCK_VALUE=tile_width(kv_heads * value_dim), SCALES=_scales(k_scale),
    )  # fmt: skip


def _scales(k_scale: Tensor | None) -> int | None:
    """Return how many scales a cache has: one, or one of each head."""
    return None if k_scale is None else len(k_scale)


def _combine(
    out: Tensor,
    parts: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None,
    out_scale: Tensor | None,
    options: dict[str, Any],
) -> None:
    _, heads, splits = lse.shape
    combine_kernel[(len(kv_lens), heads)](
        out, parts, lse, cu_seqlens, kv_lens, sinks, out_scale,
        HEADS=heads, SPLITS=splits, **options, **overlaps(out.device),
    )  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """How one call is dealt out to programs."""

    decode: bool
    splits: int
    tiles: _Tiles
    grid: tuple[int, int, int]
    """Blocks and shares of keys, key heads and sequences in decode, else the blocks of all
    sequences together.
    """


def _plan(
    query: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    counts: tuple[int, int, int],
    invariant: bool,
    bounded: bool,
) -> _Plan:
    sequences, tokens, longest_query = counts
    _, kv_heads, page_size, value_dim = v_cache.shape
    _, heads, dim = query.shape
    group, channels = heads // kv_heads, max(tile_width(dim), tile_width(value_dim))
    if longest_query == 1 and not invariant:
        most_keys = block_table.shape[1] * page_size
        wanted = PROGRAMS_PER_PROCESSOR * processors(query.device) // (kv_heads * sequences)
        tiles, splits = _decode_tiles(group, channels, query.dtype, most_keys, wanted)
        blocks = triton.cdiv(group, tiles.rows)
        return _Plan(True, splits, tiles, (blocks * splits, kv_heads, sequences))
    rows = INVARIANT_ROWS if invariant else longest_query * group
    crowded = tokens * group < sequences * BLOCKS_PER_SEQUENCE * 2 * FEW_ROWS
    if crowded and channels <= 128:
        rows = min(rows, FEW_ROWS)
    tiles = _prefill_tiles(rows, channels, query.dtype, bounded)
    blocks = most_blocks(tokens, sequences, group, tiles.rows)
    return _Plan(False, 1, tiles, (blocks, kv_heads, 1))


_SCHEMA = schema_of(torch_cached_attention.__name__)


@register_op(
    fake_cached_attention, mutates=("k_cache", "v_cache"), schema=_SCHEMA, any_lengths=True
)
def triton_cached_attention(*arguments: Any, **keywords: Any) -> Tensor:
    """`torch_cached_attention` as kernels: one or two launches in decode, two otherwise.

    Where all sequences of a step begin with it, nothing has to be read from pages: `dense_prefill`.
    `batch_info_host` says which kernels run: a captured decode step may be replayed for the same
    number of sequences.
    """
    return attend(False, *arguments, **keywords)


@register_op(
    fake_cached_attention,
    mutates=("k_cache", "v_cache"),
    schema=_SCHEMA,
    any_lengths=True,
    invariant_form_of="triton_cached_attention",
)
def invariant_cached_attention(*arguments: Any, **keywords: Any) -> Tensor:
    """`triton_cached_attention` whose rows are the same, bit for bit, in every step: alone, with
    others, in chunks.

    A row meets the keys of its sequence in order, in tiles that begin where its pages say, in one
    program.
    """
    return attend(True, *arguments, **keywords)


def attend(
    invariant: bool, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, kv_lens: Tensor,
    block_table: Tensor, slot_mapping: Tensor, batch_info_host: Tensor, k_cache: Tensor, v_cache: Tensor,
    sinks: Tensor | None = None, scale: float | None = None, sliding_window: int | None = None,
    logit_cap: float | None = None, alibi_slopes: Tensor | None = None, chunk_size: int | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, out_scale: Tensor | None = None,
    rotation: Rotation | None = None,
) -> Tensor:  # fmt: skip
    """Attend, in decode with a rotation that the kernel does while it loads, else behind one; norms of
    heads are taken in by the kernel of one launch alone.
    """
    require_device(query)
    sequences, real, longest_query, *_ = batch_info_host.tolist()
    q, k, v = (last_contiguous(t)[0] for t in (query, key, value))
    decodes = longest_query == 1 and not invariant
    known = decodes and alibi_slopes is k_scale is out_scale is None
    fits = known and suits_one_launch(q, k, v, sequences, (k_cache, v_cache), sinks, rotation)
    if rotation is not None and not (fits or (decodes and rotation.norms is None)):
        q, k = (turned[0] for turned in turn_heads(query, key, *rotation))
        rotation = None
    (tokens, heads, dim), (kv_heads, value_dim) = q.shape, v.shape[1:]
    counts, bounded = (sequences, real, longest_query), bool(sliding_window or chunk_size)
    plan = _plan(q, v_cache, block_table, counts, invariant, bounded)
    if not plan.decode:
        _write(k, v, slot_mapping, k_cache, v_cache, k_scale, v_scale)
        others = (sinks, sliding_window, logit_cap, alibi_slopes, chunk_size)
        plain = not invariant and all(each is None for each in others)
        if plain and takes_whole_prompts(q, k, v, k_cache, batch_info_host):
            mixed = attend_whole_prompts(q, k, v, cu_seqlens, batch_info_host, scale)
            return as_output(mixed, out_scale)[None]
    kind = q.dtype if out_scale is None else torch.float8_e4m3fn
    out = parts = lse = output_rows((tokens, heads, value_dim), kind, batch_info_host, q.device)
    scale = dim**-0.5 if scale is None else scale
    if fits:
        there = Sequences(cu_seqlens, kv_lens, block_table, slot_mapping, sequences)
        scores = Scores(scale, sinks, sliding_window or 0, logit_cap, chunk_size or 0)
        decode_attention(out, q, k, v, there, (k_cache, v_cache), scores, rotation)
        return out[None]
    if plan.splits > 1:
        lse = q.new_empty((tokens, heads, plan.splits), dtype=torch.float32)
        parts = lse.new_empty((*lse.shape, value_dim))
    common: dict[str, Any] = {
        "VALUE_DIM": value_dim, "WINDOW": sliding_window, "CHUNK": chunk_size, "HAS_SINKS": sinks is not None,
        "BLOCK_N": plan.tiles.keys, "BLOCK_VALUE": tile_width(value_dim), "CODES": out_scale is not None,
    }  # fmt: skip
    tables, steps, turning = decoding_rotation(rotation)
    attention_kernel[plan.grid](
        parts, lse, q, k, v, cu_seqlens, kv_lens, block_table, slot_mapping, k_cache, v_cache, sinks, alibi_slopes,
        k_scale, v_scale, out_scale, *tables, scale, plan.splits, sequences, *steps,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], block_table.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=k_cache.shape[2], LOGIT_CAP=logit_cap,
        HAS_SLOPES=alibi_slopes is not None,
        SPLIT=plan.splits > 1, WRITE=plan.decode, MASK_ALL=invariant, DOT_TYPE=dot_type(q.dtype),
        BLOCK_M=plan.tiles.rows, BLOCK_DIM=tile_width(dim), SCALES=_scales(k_scale), **turning, **common,
        num_warps=plan.tiles.num_warps, num_stages=plan.tiles.num_stages, **overlaps(q.device),
    )  # fmt: skip
    if plan.splits > 1:
        _combine(out, parts, lse, cu_seqlens, kv_lens, sinks, out_scale, common)
    return out[None]

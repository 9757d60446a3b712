"""Attention over a paged key-value cache: how the kernels are launched.

Nothing here waits for the device, and in decode every grid follows from shapes alone: a step can be captured as a CUDA
graph and replayed with other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.cached_attention import fake_cached_attention
from onboard.ops.library import register_op
from onboard.ops.triton.attention_kernels import attention_kernel, combine_kernel, write_cache_kernel
from onboard.ops.triton.launch import INTERPRETED, last_contiguous, power_of_two, processors, require_device, tile_width

MOST_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4
"""Decode programs that one multiprocessor has in flight: what hides the latency of memory."""

_DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class _Tiles:
    """Tile sizes and launch options of one call."""

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int


def _decode_tiles(
    sequences: int, kv_heads: int, group: int, most_keys: int, wide: bool, device: torch.device
) -> _Tiles:
    """Few rows, and a power of two of splits to fill the device; `most_keys` is what the block table has room for."""
    keys = 32 if wide else 64
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors(device), sequences * kv_heads)
    splits = min(wanted, triton.cdiv(most_keys, keys), MOST_SPLITS)
    return _Tiles(tile_width(group), keys, power_of_two(splits), num_warps=4, num_stages=2)


def _prefill_tiles(rows: int, wide: bool) -> _Tiles:
    """Tiles as large as registers allow; `wide`: float32, or heads of more than 128 channels."""
    if wide:
        return _Tiles(min(64, tile_width(rows)), 32, 1, num_warps=4, num_stages=2)
    return _Tiles(min(128, tile_width(rows)), 64, 1, num_warps=8 if rows > 64 else 4, num_stages=3)


def _write(key: Tensor, value: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    kv_heads, dim, value_dim = key.shape[1], key.shape[2], value.shape[2]
    write_cache_kernel[(len(slot_mapping),)](
        key, value, k_cache, v_cache, slot_mapping, *key.stride()[:2], *value.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim, PAGE=k_cache.shape[2],
        BLOCK_KEY=power_of_two(kv_heads * dim), BLOCK_VALUE=power_of_two(kv_heads * value_dim),
    )  # fmt: skip


@register_op(fake_cached_attention, mutates=("k_cache", "v_cache"))
def triton_cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
) -> Tensor:
    """`torch_cached_attention` as kernels: one or two launches in decode, two otherwise.

    `batch_info_host` says which kernels run: a captured decode step may be replayed for the same number of sequences.
    """
    require_device(query)
    q, k, v = (last_contiguous(t)[0] for t in (query, key, value))
    tokens, heads, dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    page_size, group = k_cache.shape[2], heads // kv_heads
    sequences, _, longest_query, _ = batch_info_host.tolist()
    decode = longest_query == 1
    wide = max(dim, value_dim) > 128 or q.dtype == torch.float32
    if decode:
        most_keys = block_table.shape[1] * page_size
        tiles = _decode_tiles(sequences, kv_heads, group, most_keys, wide, q.device)
    else:
        tiles = _prefill_tiles(longest_query * group, wide)
    # Rows that no sequence owns must be zeros; a decode batch has none, it is padded with whole sequences.
    new = q.new_empty if decode and tokens == sequences else q.new_zeros
    out = new((tokens, heads, value_dim))
    if not decode:
        _write(k, v, slot_mapping, k_cache, v_cache)
    parts, lse = out, out
    if tiles.splits > 1:
        parts = q.new_empty((tokens, heads, tiles.splits, value_dim), dtype=torch.float32)
        lse = q.new_empty((tokens, heads, tiles.splits), dtype=torch.float32)
    common: dict[str, Any] = {
        "VALUE_DIM": value_dim,
        "WINDOW": sliding_window,
        "HAS_SINKS": sinks is not None,
        "BLOCK_N": tiles.keys,
        "BLOCK_VALUE": tile_width(value_dim),
    }
    blocks = triton.cdiv(longest_query * group, tiles.rows)
    attention_kernel[(blocks * tiles.splits, kv_heads, sequences)](
        parts, lse, q, k, v, cu_seqlens, kv_lens, block_table, slot_mapping, k_cache, v_cache, sinks,
        dim**-0.5 if scale is None else scale, tiles.splits,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], block_table.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, PAGE=page_size, LOGIT_CAP=logit_cap,
        SPLIT=tiles.splits > 1, WRITE=decode,
        DOT_TYPE=tl.float32 if INTERPRETED else _DOT_TYPES[q.dtype],  # the interpreter has no bfloat16 product
        BLOCK_M=tiles.rows, BLOCK_DIM=tile_width(dim), **common,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if tiles.splits > 1:
        combine_kernel[(sequences, heads)](
            out, parts, lse, cu_seqlens, kv_lens, sinks, HEADS=heads, SPLITS=tiles.splits, **common
        )
    return out[None]

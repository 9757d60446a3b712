"""Decode steps of latent attention whose keys several programs share: how their sums are joined."""

from __future__ import annotations

import triton
from torch import Tensor

from onboard.ops.attention.attention_kernels import combine_kernel
from onboard.ops.triton.launch import overlaps, tile_width

MOST_SPLITS = 128
_CHANNELS = 128
"""What one warp joins: programs so small that many run at a time."""


def join_parts(
    out: Tensor, parts: Tensor, lse: Tensor, cu_seqlens: Tensor, kv_lens: Tensor,
    sequences: int, keys: int,
) -> None:  # fmt: skip
    """Write the latents that each query and head mixes to `out` [tokens, heads, rank].

    Args:
        out: rows of tokens beyond the last sequence stay as they are.
        parts: [tokens, heads, splits, rank] float32, what each program has mixed.
        lse: [tokens, heads, splits] float32, base 2 logarithms of their sums of weights.
        cu_seqlens, kv_lens: as of `triton_cached_mla`.
        sequences: how many there are, of one token each at most.
        keys: of a tile, of which programs have whole numbers.
    """
    _, heads, splits, rank = parts.shape
    channels = min(_CHANNELS, tile_width(rank))
    combine_kernel[(sequences, heads, triton.cdiv(rank, channels))](
        out, parts, lse, cu_seqlens, kv_lens, None, None, HEADS=heads, VALUE_DIM=rank, WINDOW=None, CHUNK=None,
        HAS_SINKS=False, SPLITS=splits, BLOCK_N=keys, BLOCK_VALUE=channels, num_warps=1, **overlaps(out.device),
    )  # fmt: skip

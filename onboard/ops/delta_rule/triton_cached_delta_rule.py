"""The delta rule, gated or not, with a cache of each sequence's state: how its kernels are
launched.

Nothing here waits for the device, and in decode every grid follows from shapes alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from onboard.ops.delta_rule.delta_rule import fake_delta_rule
from onboard.ops.delta_rule.delta_rule_kernels import (
    delta_chunk_kernel,
    delta_solve_kernel,
    delta_step_kernel,
)
from onboard.ops.library import register_op
from onboard.ops.recurrences.triton_state import chunk_options
from onboard.ops.result_places import output_rows
from onboard.ops.triton.launch import (
    last_contiguous,
    overlaps,
    power_of_two,
    processors,
    require_device,
    tile_width,
)

CHUNK = 64
MOST_STEPS = 4
"""Longest query that goes from token to token."""
STATE_ELEMENTS = 4096
"""Numbers of a state that a program of four warps keeps in registers."""


@register_op(fake_delta_rule, mutates=("delta_cache",))
def triton_cached_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    delta_cache: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """`torch_cached_gated_delta_rule` as kernels: one launch in decode, two otherwise."""
    spans = (cu_seqlens, kv_lens, state_slots)
    return cached_delta_rule(
        q, k, v, g, beta, spans, batch_info_host, delta_cache, scale, use_qk_l2norm_in_kernel
    )


@register_op(fake_delta_rule, mutates=("delta_cache",))
def triton_cached_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    delta_cache: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """`torch_cached_delta_rule` as kernels: those of the gated one, without the gate."""
    spans = (cu_seqlens, kv_lens, state_slots)
    return cached_delta_rule(
        q, k, v, None, beta, spans, batch_info_host, delta_cache, scale, use_qk_l2norm_in_kernel
    )


def cached_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    spans: tuple[Tensor, Tensor, Tensor],
    batch_info_host: Tensor,
    cache: Tensor,
    scale: float | None,
    normalise: bool,
) -> Tensor:
    """Return the outputs of the gated delta rule, or without `g` of the plain one; the cache is
    written to.
    """
    require_device(q)
    q, k, v, beta = (last_contiguous(each)[0] for each in (q, k, v, beta))
    g = None if g is None else last_contiguous(g)[0]
    (heads, value), (key_heads, key) = v.shape[1:], k.shape[1:]
    sequences, _, longest_query, *_ = batch_info_host.tolist()
    out = output_rows(tuple(v.shape), q.dtype, batch_info_host, q.device)
    factor = key**-0.5 if scale is None else scale
    gate_stride = 0 if g is None else g.stride(0)
    strides = (
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        gate_stride,
        beta.stride(0),
        cache.stride(0),
    )
    sizes: dict[str, Any] = {
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "KEY": key,
        "VALUE": value,
    }
    sizes |= {"GATED": g is not None, "NORMALISE": normalise}
    if longest_query <= MOST_STEPS:
        width = _step_width(tile_width(key), value, heads * sequences, q.device)
        delta_step_kernel[(triton.cdiv(value, width), heads, sequences)](
            out, q, k, v, g, beta, *spans, cache, factor, *strides, **sizes,
            BLOCK_K=tile_width(key), BLOCK_V=width, num_warps=4, **overlaps(q.device),
        )  # fmt: skip
        return out[None]
    tiles = {"BLOCK_K": tile_width(key), **chunk_options(CHUNK, q.dtype)}
    inverse = q.new_empty((len(v), heads, tiles["CHUNK"]), dtype=torch.float32)
    solve = {name: size for name, size in sizes.items() if name != "VALUE"}
    delta_solve_kernel[(triton.cdiv(longest_query, tiles["CHUNK"]), heads, sequences)](
        inverse, k, g, beta, *spans, *k.stride()[:2], gate_stride, beta.stride(0), **solve, **tiles
    )
    width = min(32, tile_width(value))
    delta_chunk_kernel[(triton.cdiv(value, width), heads, sequences)](
        out, inverse, q, k, v, g, beta, *spans, cache, factor, *strides, **sizes, **tiles,
        BLOCK_V=width,
    )  # fmt: skip
    return out[None]


def _step_width(keys: int, value: int, states: int, device: torch.device) -> int:
    """Value channels of a program: fewer when there are few states, so that all multiprocessors
    have work.
    """
    width = min(power_of_two(value), max(8, STATE_ELEMENTS // keys))
    while width > 8 and states * triton.cdiv(value, width) < 2 * processors(device):
        width //= 2
    return width

"""The delta rule, gated or not, and Kimi Delta Attention, with a cache of each sequence's state: how
their kernels are launched.

Nothing here waits for the device, and in decode every grid follows from shapes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from onboard.ops.delta_rule.delta_rule import fake_delta_rule
from onboard.ops.delta_rule.delta_rule_kernels import (
    delta_chunk_kernel,
    delta_solve_kernel,
    delta_step_kernel,
)
from onboard.ops.delta_rule.kda_kernels import ROWS, kda_products_kernel
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


@register_op(fake_delta_rule, mutates=("kda_cache",))
def triton_cached_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    kda_cache: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """`torch_cached_kda` as kernels: those of the gated delta rule, and one more but in decode."""
    spans = (cu_seqlens, kv_lens, state_slots)
    return cached_delta_rule(
        q, k, v, g, beta, spans, batch_info_host, kda_cache, scale, use_qk_l2norm_in_kernel
    )


class Call(NamedTuple):
    """What all kernels of a step take: tensors without the batch, strides by the names of kernels'
    arguments, and sizes.
    """

    out: Tensor
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]
    spans: tuple[Tensor, Tensor, Tensor]
    cache: Tensor
    scale: float
    strides: dict[str, int]
    sizes: dict[str, Any]

    def only(self, *names: str) -> dict[str, Any]:
        """Return the strides of some inputs."""
        return {key: size for key, size in self.strides.items() if key.split("_")[0] in names}


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
    """Return the outputs of the gated delta rule, with a gate of each head or key channel, or
    without `g` of the plain one; the cache is written to.
    """
    require_device(q)
    q, k, v, beta = (last_contiguous(each)[0] for each in (q, k, v, beta))
    g = None if g is None else last_contiguous(g)[0]
    strides = {"beta_stride_token": beta.stride(0), "cache_stride": cache.stride(0)}
    for name, each in (("q", q), ("k", k), ("v", v), ("g", g)):
        strides[f"{name}_stride_token"] = 0 if each is None else each.stride(0)
        strides[f"{name}_stride_head"] = 0 if each is None else each.stride(1)
    (heads, value), (key_heads, key) = v.shape[1:], k.shape[1:]
    gate = "" if g is None else "channel" if g.dim() == 3 else "head"
    sizes: dict[str, Any] = {"HEADS": heads, "GROUP": heads // key_heads}
    sizes |= {"KEY": key, "VALUE": value, "BLOCK_K": tile_width(key)}
    sizes |= {"GATE": gate, "NORMALISE": normalise}
    out = output_rows(tuple(v.shape), q.dtype, batch_info_host, q.device)
    factor = key**-0.5 if scale is None else scale
    call = Call(out, (q, k, v, g, beta), spans, cache, factor, strides, sizes)
    sequences, _, longest_query, *_ = batch_info_host.tolist()
    if longest_query <= MOST_STEPS:
        width = _step_width(tile_width(key), value, heads * sequences, q.device)
        delta_step_kernel[(triton.cdiv(value, width), heads, sequences)](
            out, *call.inputs, *spans, cache, factor, **strides, **sizes,
            BLOCK_V=width, num_warps=4, **overlaps(q.device),
        )  # fmt: skip
    else:
        _chunks(call, sequences, longest_query)
    return out[None]


def _chunks(call: Call, sequences: int, longest_query: int) -> None:
    """Write the outputs, and the states behind them, from chunk to chunk."""
    q, k, v, g, beta = call.inputs
    heads, value = v.shape[1:]
    tiles = chunk_options(CHUNK, q.dtype)
    sizes, shape = call.sizes | tiles, (len(v), heads, tiles["CHUNK"])
    inverse = q.new_empty(shape, dtype=torch.float32)
    weights = inverse
    if sizes["GATE"] == "channel":
        weights = torch.empty_like(inverse)
        kept = {
            name: size for name, size in sizes.items() if name not in ("VALUE", "GROUP", "GATE")
        }
        rows = min(ROWS, tiles["CHUNK"])
        kda_products_kernel[(triton.cdiv(longest_query, rows), heads, sequences)](
            inverse, weights, q, k, g, beta, *call.spans, call.scale, **call.only("q", "k", "g", "beta"),
            **kept | {"num_warps": 4}, ROWS=rows,
        )  # fmt: skip
    kept = {name: size for name, size in sizes.items() if name != "VALUE"}
    delta_solve_kernel[(triton.cdiv(longest_query, tiles["CHUNK"]), heads, sequences)](
        inverse, k, g, beta, *call.spans, **call.only("k", "g", "beta"), **kept
    )
    width = min(32, tile_width(value))
    delta_chunk_kernel[(triton.cdiv(value, width), heads, sequences)](
        call.out, inverse, weights, *call.inputs, *call.spans, call.cache, call.scale,
        **call.strides, **sizes, BLOCK_V=width,
    )  # fmt: skip


def _step_width(keys: int, value: int, states: int, device: torch.device) -> int:
    """Value channels of a program: fewer when there are few states, so that all multiprocessors
    have work.
    """
    width = min(power_of_two(value), max(8, STATE_ELEMENTS // keys))
    while width > 8 and states * triton.cdiv(value, width) < 2 * processors(device):
        width //= 2
    return width

"""State space models with a cache of each sequence's state: how their kernels are launched.

Nothing here waits for the device, and in decode every grid follows from shapes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.recurrences.triton_state import chunk_options
from onboard.ops.result_places import output_rows
from onboard.ops.ssm.ssd_kernels import ssd_output_kernel, ssd_pass_kernel, ssd_state_kernel
from onboard.ops.ssm.ssm import fake_ssm
from onboard.ops.ssm.ssm_kernels import selective_scan_kernel, ssm_chunk_kernel, ssm_step_kernel
from onboard.ops.triton.launch import (
    dot_type,
    last_contiguous,
    overlaps,
    power_of_two,
    processors,
    require_device,
    tile_width,
)

CHUNK = 64
MOST_STEPS = 4
"""Longest query that goes from token to token: a chunk takes as long for one token as for all of
its own."""
LONG_CHUNK, LONG_QUERY = 128, 512
"""Length of the chunks of a query from that length on; they are then found at once, unless heads and
sequences keep `SHARE_BUSY` of the processors busy without."""
SHARE_BUSY = 0.875
SCAN_WIDTH, SCAN_WARPS = 64, 4
"""Channels and warps of a program that goes from chunk to chunk, for inputs of 16 bits."""
PASS_BLOCK = 1024
STATE_ELEMENTS = 4096
"""Numbers of a state that a program of four warps keeps in registers."""
WARP_ELEMENTS, HEADS_EACH, WARPS_BUSY = 1024, 4, 16
"""Numbers of a state and heads of a program of one warp, and how many of these a processor is to
have. Measured on compute capability 9.0 with 64 heads of 64 channels and 128 states.
"""
SCAN_ELEMENTS = 512
"""The same for a program of one warp; the tokens of a scan come one by one, so that many programs
have to run.
"""


class Call(NamedTuple):
    """What all kernels of a step take."""

    tensors: tuple[Tensor, ...]
    """The output, the scan's tensors without the batch, where each sequence is, and the states."""
    strides: tuple[int, ...]
    sizes: dict[str, Any]

    @property
    def out(self) -> Tensor:
        """The output, [tokens, heads, head_dim]."""
        return self.tensors[0]


@register_op(fake_ssm, mutates=("ssm_cache",))
def triton_cached_ssm(
    hidden_states: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    ssm_cache: Tensor,
    time_step_limit: list[float],
    chunk_size: int,
) -> Tensor:
    """`torch_cached_ssm` as kernels: sequences of few new tokens have that which goes from token to
    token, whatever others there are. Chunks have a size of their own, which changes rounding only.
    """
    require_device(hidden_states)
    row = (hidden_states, A, B, C, D, dt, dt_bias)
    metadata = (cu_seqlens, kv_lens, state_slots, batch_info_host)
    return scan(prepared(row, metadata, ssm_cache), time_step_limit, batch_info_host)


def scan(call: Call, time_step_limit: list[float], batch_info_host: Tensor) -> Tensor:
    """Launch a step's kernels; return the output with a batch of one row."""
    sequences, tokens, longest_query, *_ = batch_info_host.tolist()
    if longest_query <= MOST_STEPS or sequences * longest_query != tokens:
        (heads, size), device = call.out.shape[1:], call.out.device
        width, each, warps = _step_tiles(call.sizes["BLOCK_N"], size, heads, sequences, device)
        ssm_step_kernel[(triton.cdiv(size, width), triton.cdiv(heads, each), sequences)](
            *call.tensors, *time_step_limit, *call.strides, **call.sizes,
            EACH=each, BLOCK_P=width, num_warps=warps, **overlaps(device),
        )  # fmt: skip
    launch_chunks(call, time_step_limit, batch_info_host)
    return call.out[None]


def prepared(
    row: tuple[Tensor, ...],
    metadata: tuple[Tensor, Tensor, Tensor, Tensor],
    cache: Tensor,
    dtype: torch.dtype = torch.float32,
    steady: bool = False,
) -> Call:
    """Return what kernels take, whose output has `dtype`; `steady`: each token takes one unit of
    time, decays are exp(-A), and nothing reads D, dt and dt_bias.
    """
    hidden_states, A, B, C, D, dt, dt_bias = row
    x, B, C, dt = (last_contiguous(each)[0] for each in (hidden_states, B, C, dt))
    (heads, size), (groups, state) = x.shape[1:], B.shape[1:]
    out = output_rows(tuple(x.shape), dtype, metadata[3], x.device)
    strides = (*x.stride()[:2], *B.stride()[:2], *C.stride()[:2], dt.stride(0), cache.stride(0))
    sizes = {"HEADS": heads, "GROUP": heads // groups, "SIZE": size, "STATE": state}
    sizes |= {"BLOCK_N": tile_width(state), "STEPS": MOST_STEPS, "STEADY": steady}
    return Call((out, x, A, B, C, D, dt, dt_bias, *metadata[:3], cache), strides, sizes)


def launch_chunks(call: Call, time_step_limit: list[float], batch_info_host: Tensor) -> None:
    """Take all sequences of more tokens than go one by one, from chunk to chunk where that keeps
    the device busy, else all chunks at once.
    """
    sequences, tokens, longest_query, *_ = batch_info_host.tolist()
    if longest_query <= call.sizes["STEPS"]:
        return
    x = call.tensors[1]
    heads, size = x.shape[1:]
    programs = triton.cdiv(size, SCAN_WIDTH) * heads * tokens // longest_query
    if longest_query >= LONG_QUERY and programs < processors(x.device) * SHARE_BUSY:
        _all_chunks(call, time_step_limit, sequences, longest_query)
        return
    options = chunk_options(CHUNK, x.dtype)
    if x.dtype != torch.float32:
        options["num_warps"] = SCAN_WARPS
    ssm_chunk_kernel[(triton.cdiv(size, SCAN_WIDTH), heads, sequences)](
        *call.tensors, *time_step_limit, *call.strides, **call.sizes, **options,
        DOT_TYPE=dot_type(x.dtype), BLOCK_P=SCAN_WIDTH,
    )  # fmt: skip


def _all_chunks(
    call: Call, time_step_limit: list[float], sequences: int, longest_query: int
) -> None:
    """Write the outputs and the states behind them, the chunks of long queries in parallel."""
    out, x, A, B, C, D, dt, dt_bias, *spans, cache = call.tensors
    (heads, size), sizes = x.shape[1:], call.sizes
    state = sizes["STATE"]
    options = chunk_options(LONG_CHUNK, x.dtype) | {"DOT_TYPE": dot_type(x.dtype)}
    length = options["CHUNK"]
    chunks, numbers = triton.cdiv(longest_query, length), len(x) // length + sequences
    states = torch.empty((numbers, heads, size * state), dtype=torch.float32, device=x.device)
    decays = torch.empty((numbers, heads), dtype=torch.float32, device=x.device)
    width = min(64, tile_width(size))
    grid = (triton.cdiv(size, width), heads, sequences * chunks)
    ssd_state_kernel[grid](
        states, decays, x, A, B, D, dt, dt_bias, *spans, chunks, *time_step_limit,
        *x.stride()[:2], *B.stride()[:2], dt.stride(0), **sizes, **options, BLOCK_P=width,
    )  # fmt: skip
    ssd_pass_kernel[(triton.cdiv(size * state, PASS_BLOCK), heads, sequences)](
        states, decays, *spans, cache, cache.stride(0),
        HEADS=heads, ELEMENTS=size * state, STEPS=sizes["STEPS"], CHUNK=length, BLOCK=PASS_BLOCK, num_warps=4,
    )  # fmt: skip
    ssd_output_kernel[grid](
        out, states, x, A, B, C, D, dt, dt_bias, *spans, chunks, *time_step_limit,
        *x.stride()[:2], *B.stride()[:2], *C.stride()[:2], dt.stride(0), **sizes, **options, BLOCK_P=width,
    )  # fmt: skip


def _step_tiles(
    states: int, size: int, heads: int, sequences: int, device: torch.device
) -> tuple[int, int, int]:
    """Return the channels and heads of a program, and its warps: one warp that goes from head to head
    where there is work for many, else few channels, so that all multiprocessors have some.
    """
    narrow = min(power_of_two(size), max(1, WARP_ELEMENTS // states))
    programs = triton.cdiv(size, narrow) * triton.cdiv(heads, HEADS_EACH) * sequences
    if programs >= WARPS_BUSY * processors(device):
        return narrow, HEADS_EACH, 1
    width = min(power_of_two(size), max(4, STATE_ELEMENTS // states))
    while width > 4 and heads * sequences * triton.cdiv(size, width) < 2 * processors(device):
        width //= 2
    return width, 1, 4


@register_op(
    lambda hidden_states, *_, **__: torch.empty_like(
        hidden_states, memory_format=torch.contiguous_format
    ),
    mutates=("scan_cache",),
)
def triton_cached_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    scan_cache: Tensor,
) -> Tensor:
    """`torch_cached_selective_scan` as one kernel."""
    require_device(hidden_states)
    x, dt, B, C = (last_contiguous(each)[0] for each in (hidden_states, dt, B, C))
    gate = x if z is None else last_contiguous(z)[0]
    channels, state = A.shape
    out = output_rows(tuple(x.shape), x.dtype, batch_info_host, x.device)
    block_n = power_of_two(state)
    width = min(power_of_two(channels), max(1, SCAN_ELEMENTS // block_n))
    selective_scan_kernel[(triton.cdiv(channels, width), int(batch_info_host[0]))](
        out, x, dt, A.contiguous(), B, C, D, gate, dt_bias, cu_seqlens, kv_lens, state_slots, scan_cache,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), gate.stride(0), scan_cache.stride(0),
        CHANNELS=channels, STATE=state, HAS_D=D is not None, HAS_GATE=z is not None, HAS_BIAS=dt_bias is not None,
        BLOCK_C=width, BLOCK_N=block_n, num_warps=1,
    )  # fmt: skip
    return out[None]

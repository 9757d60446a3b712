"""The matrix LSTM with a cache of each sequence's state: how its kernels are launched.

Nothing here waits for the device, and in decode every grid follows from shapes alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.recurrences.mlstm import fake_mlstm
from onboard.ops.recurrences.mlstm_kernels import (
    mlstm_chunk_kernel,
    mlstm_divide_kernel,
    mlstm_step_kernel,
)
from onboard.ops.recurrences.triton_state import chunk_options
from onboard.ops.result_places import output_rows
from onboard.ops.triton.launch import (
    dot_type,
    last_contiguous,
    overlaps,
    power_of_two,
    processors,
    require_device,
    tile_width,
)

CHUNK, WIDTH, WARPS = 32, 32, 4
"""Tokens of a chunk, and value channels and, for inputs of 16 bits, warps of a program then.

Not 64 tokens: Triton 3.6 multiplies 64 rows by asynchronous instructions, which read beyond the
shared memory of 16-bit operands of 32 columns.
"""
MOST_STEPS = 4
"""Longest query that goes from token to token."""
STATE_ELEMENTS = 8192
"""Numbers of a memory that a program of eight warps keeps in registers."""


@register_op(fake_mlstm, mutates=("mlstm_cache",))
def triton_cached_mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    igate: Tensor,
    fgate: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    mlstm_cache: Tensor,
    eps: float,
) -> Tensor:
    """`torch_cached_mlstm` as two kernels; in chunks inputs of 16 bits are multiplied as these."""
    require_device(q)
    q, k, v, igate, fgate = (last_contiguous(each)[0] for each in (q, k, v, igate, fgate))
    tokens, heads, value = v.shape
    sequences, real, longest_query, *_ = batch_info_host.tolist()
    out = output_rows((tokens, heads, value), q.dtype, batch_info_host, q.device)
    sums = torch.empty((tokens, heads, value + 2), dtype=torch.float32, device=q.device)
    tensors = (sums, q, k, v, igate, fgate, cu_seqlens, kv_lens, state_slots, mlstm_cache)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], igate.stride(0), fgate.stride(0))
    scalars = (*strides, mlstm_cache.stride(0), q.shape[2] ** -0.5)
    sizes: dict[str, Any] = {"HEADS": heads, "KEY": q.shape[2], "VALUE": value}
    sizes["BLOCK_K"] = tile_width(q.shape[2])
    if longest_query <= MOST_STEPS:
        width = _step_width(sizes["BLOCK_K"], value + 1, heads * sequences, q.device)
        mlstm_step_kernel[(triton.cdiv(value + 1, width), heads, sequences)](
            *tensors, *scalars, **sizes, BLOCK_V=width, num_warps=8, **overlaps(q.device)
        )
    else:
        mlstm_chunk_kernel[(triton.cdiv(value + 1, WIDTH), heads, sequences)](
            *tensors, *scalars, **sizes, **_chunk_options(q.dtype),
            DOT_TYPE=dot_type(q.dtype), BLOCK_V=WIDTH,
        )  # fmt: skip
    mlstm_divide_kernel[(real * heads,)](
        out, sums, eps, VALUE=value, BLOCK_V=power_of_two(value), **overlaps(q.device)
    )
    return out[None]


def _chunk_options(dtype: torch.dtype) -> dict[str, Any]:
    options = chunk_options(CHUNK, dtype)
    return options if dtype == torch.float32 else options | {"num_warps": WARPS}


def _step_width(keys: int, channels: int, states: int, device: torch.device) -> int:
    """Value channels of a program: fewer when there are few states, so that all multiprocessors
    have work.
    """
    width = min(power_of_two(channels), max(8, STATE_ELEMENTS // keys))
    while width > 8 and states * triton.cdiv(channels, width) < processors(device):
        width //= 2
    return width

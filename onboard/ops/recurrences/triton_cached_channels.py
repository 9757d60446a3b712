"""Recurrences in which no two channels meet, with a cache of each sequence's state: how their
kernels are launched.

Nothing here waits for the device, and in decode every grid follows from shapes alone.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.recurrences.channel_kernels import (
    linear_recurrence_kernel,
    token_shift_kernel,
    wkv_kernel,
)
from onboard.ops.recurrences.linear_recurrence import fake_linear_recurrence
from onboard.ops.recurrences.token_shift import fake_token_shift
from onboard.ops.recurrences.wkv import fake_wkv
from onboard.ops.result_places import output_rows
from onboard.ops.triton.launch import last_contiguous, overlaps, power_of_two, require_device

CHUNK, CHANNELS = 64, 32
"""Tokens and channels of a program at a time."""
MOST_STEPS, STEP_CHANNELS = 4, 128
"""Longest query that goes from token to token, and channels of a program then."""


@register_op(fake_linear_recurrence, mutates=("recurrence_cache",))
def triton_cached_linear_recurrence(
    x: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    recurrence_cache: Tensor,
) -> Tensor:
    """`torch_cached_linear_recurrence` as one kernel."""
    require_device(x)
    x, decay = (last_contiguous(each)[0] for each in (x, decay))
    out = output_rows(tuple(x.shape), x.dtype, batch_info_host, x.device)
    tiles, blocks = _tiles(x, batch_info_host)
    linear_recurrence_kernel[(blocks, int(batch_info_host[0]))](
        out, x, decay, cu_seqlens, kv_lens, state_slots, recurrence_cache,
        x.stride(0), decay.stride(0), recurrence_cache.stride(0), **tiles,
    )  # fmt: skip
    return out[None]


@register_op(fake_wkv, mutates=("wkv_cache",))
def triton_cached_wkv(
    key: Tensor,
    value: Tensor,
    time_decay: Tensor,
    time_first: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    wkv_cache: Tensor,
) -> Tensor:
    """`torch_cached_wkv` as one kernel."""
    require_device(key)
    key, value = (last_contiguous(each)[0] for each in (key, value))
    out = output_rows(tuple(key.shape), key.dtype, batch_info_host, key.device)
    tiles, blocks = _tiles(key, batch_info_host)
    wkv_kernel[(blocks, int(batch_info_host[0]))](
        out, key, value, time_decay.contiguous(), time_first.contiguous(), cu_seqlens, kv_lens, state_slots,
        wkv_cache, key.stride(0), value.stride(0), wkv_cache.stride(0), **tiles,
    )  # fmt: skip
    return out[None]


@register_op(fake_token_shift, mutates=("shift_cache",))
def triton_cached_token_shift(
    x: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    shift_cache: Tensor,
) -> Tensor:
    """`torch_cached_token_shift` as one kernel."""
    require_device(x)
    x = last_contiguous(x)[0]
    out = output_rows(tuple(x.shape), x.dtype, batch_info_host, x.device)
    tiles, blocks = _tiles(x, batch_info_host)
    sequences, _, longest_query, *_ = batch_info_host.tolist()
    token_shift_kernel[(triton.cdiv(longest_query, tiles["CHUNK"]), blocks, sequences)](
        out, x, cu_seqlens, kv_lens, state_slots, shift_cache,
        x.stride(0), shift_cache.stride(0), **tiles,
    )  # fmt: skip
    return out[None]


def _tiles(x: Tensor, batch_info_host: Tensor) -> tuple[dict[str, Any], int]:
    """Return the sizes of a kernel over [tokens, channels], and how many blocks of channels."""
    steps, channels = int(batch_info_host[2]) <= MOST_STEPS, x.shape[1]
    width = min(STEP_CHANNELS if steps else CHANNELS, power_of_two(channels))
    tiles = {"CHANNELS": channels, "CHUNK": 1 if steps else CHUNK, "BLOCK_C": width}
    tiles |= {"num_warps": 1 if steps else 4, **overlaps(x.device)}
    return tiles, triton.cdiv(channels, width)

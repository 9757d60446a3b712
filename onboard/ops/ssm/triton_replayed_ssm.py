"""Mamba 2's scan with a state that can be taken back: the new tokens by the kernel, the replay by
one product.
"""

from __future__ import annotations

from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.ssm.replayed_ssm import CACHES, replayed
from onboard.ops.ssm.ssm import fake_ssm
from onboard.ops.ssm.triton_cached_ssm import triton_cached_ssm


@register_op(fake_ssm, mutates=CACHES)
def triton_replayed_ssm(
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
    replay_x_cache: Tensor,
    replay_b_cache: Tensor,
    replay_dt_cache: Tensor,
    replay_start_cache: Tensor,
    time_step_limit: list[float],
    chunk_size: int,
) -> Tensor:
    """`torch_replayed_ssm` around `triton_cached_ssm`."""
    caches = (ssm_cache, replay_x_cache, replay_b_cache, replay_dt_cache, replay_start_cache)
    row = (hidden_states, A, B, C, D, dt, dt_bias)
    metadata = (cu_seqlens, kv_lens, state_slots, batch_info_host)
    return replayed(triton_cached_ssm, row, metadata, caches, time_step_limit, chunk_size)

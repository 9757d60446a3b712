"""State space models with a cache of each sequence's state."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import State, register_op
from onboard.ops.recurrences.advance import advance
from onboard.ops.ssm.ssm import fake_ssm, scan_channels, scan_heads, wide_dtype


def ssm_state(hidden_states: Tensor, B: Tensor, **_: object) -> State:
    """Return what a cached scan of Mamba 2 keeps of each sequence."""
    return (*hidden_states.shape[2:], B.shape[3]), wide_dtype(hidden_states)


@register_op(fake_ssm, mutates=("ssm_cache",), cached_form_of="torch_ssm", state=ssm_state)
def torch_cached_ssm(
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
    """`torch_ssm` of a flat row of tokens.

    Args:
        hidden_states, A, B, C, D, dt, dt_bias, time_step_limit, chunk_size: as in `torch_ssm`, a
            batch of one row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        ssm_cache: [slots, heads, head_dim, state], in the recurrence's own dtype or 16 bits; written
            to, where it has fewer bits rounded after each step.

    Returns:
        Like hidden_states, in float32 (float64 for float64); zeros for tokens beyond the last
        sequence.
    """

    def step(state: Tensor, x: Tensor, B: Tensor, C: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        state = state.to(wide_dtype(x))
        return scan_heads(x, A, B, C, D, dt, dt_bias, time_step_limit, chunk_size, state)

    out = torch.zeros_like(
        hidden_states, dtype=wide_dtype(hidden_states), memory_format=torch.contiguous_format
    )
    inputs = [hidden_states, B, C, dt]
    return advance(step, inputs, out, cu_seqlens, kv_lens, state_slots, batch_info_host, ssm_cache)


def _scan_state(hidden_states: Tensor, A: Tensor, **_: object) -> State:
    return tuple(A.shape), wide_dtype(hidden_states)


@register_op(
    lambda hidden_states, *_, **__: torch.empty_like(
        hidden_states, memory_format=torch.contiguous_format
    ),
    mutates=("scan_cache",),
    cached_form_of="torch_selective_scan",
    state=_scan_state,
)
def torch_cached_selective_scan(
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
    """`torch_selective_scan` of a flat row of tokens.

    Args:
        hidden_states, dt, A, B, C, D, z, dt_bias: as in `torch_selective_scan`, with a batch of one
            row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        scan_cache: [slots, channels, state], in the recurrence's own dtype; written to.

    Returns:
        Like hidden_states; zeros for tokens beyond the last sequence.
    """

    def step(
        state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *gate: Tensor
    ) -> tuple[Tensor, Tensor]:
        return scan_channels(x, dt, A, B, C, D, gate[0] if gate else None, dt_bias, state)

    out = torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
    inputs = [hidden_states, dt, B, C, *([] if z is None else [z])]
    return advance(step, inputs, out, cu_seqlens, kv_lens, state_slots, batch_info_host, scan_cache)

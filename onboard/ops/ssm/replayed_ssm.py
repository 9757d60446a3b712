"""Mamba 2's scan with a state that can be taken back: the tokens of the last step are replayed as
far as they count.

A speculative step reads draft tokens of which only the first ones may turn out to be right. The
cache keeps the state before the step, and the step's inputs; the next step begins with the state
that the right ones lead to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.ssm.cached_ssm import ssm_state, torch_cached_ssm
from onboard.ops.ssm.ssm import decaying_chunk, fake_ssm, wide_dtype

CACHES = ("ssm_cache", "replay_x_cache", "replay_b_cache", "replay_dt_cache", "replay_start_cache")


@register_op(fake_ssm, mutates=CACHES, state=ssm_state)
def torch_replayed_ssm(
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
    """`torch_cached_ssm` of which a sequence's next step may begin at any token of its last one, or
    behind it.

    That holds for steps of at most `replay` tokens; behind a longer one, as of a prompt, the next
    step goes on.

    Args:
        hidden_states, A, B, C, D, dt, dt_bias, time_step_limit, chunk_size: as in `torch_ssm`, a
            batch of one row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        ssm_cache: [slots, heads, head_dim, state], before the last step, in its own dtype.
        replay_x_cache: [slots, replay, heads, head_dim], the last step's hidden states.
        replay_b_cache: [slots, replay, groups, state], its B.
        replay_dt_cache: [slots, replay, heads], its dt.
        replay_start_cache: [slots, 1] int64, tokens before it. All caches are written to.

    Returns:
        Like hidden_states, in float32 (float64 for float64); zeros for tokens beyond the last
        sequence.
    """
    caches = (ssm_cache, replay_x_cache, replay_b_cache, replay_dt_cache, replay_start_cache)
    row = (hidden_states, A, B, C, D, dt, dt_bias)
    metadata = (cu_seqlens, kv_lens, state_slots, batch_info_host)
    return replayed(torch_cached_ssm, row, metadata, caches, time_step_limit, chunk_size)


def replayed(
    scan: Callable[..., Tensor],
    row: tuple[Tensor, ...],
    metadata: tuple[Tensor, Tensor, Tensor, Tensor],
    caches: tuple[Tensor, ...],
    time_step_limit: list[float],
    chunk_size: int,
) -> Tensor:
    """Return `torch_replayed_ssm`'s output, computed with `scan`, a cached scan; nothing is read
    back from the device.

    Args:
        scan: takes what `torch_cached_ssm` takes.
        row: the scan's leading tensors.
        metadata: cu_seqlens, kv_lens, state_slots and batch_info_host.
        caches: those of `CACHES`, in order.
    """
    cu_seqlens, kv_lens, slots, info = metadata
    states, xs, bs, dts, begins = caches
    new, most = cu_seqlens.diff()[: len(slots)], xs.shape[1]
    start = kv_lens - new
    before = fast_forward(caches, slots, start, row, time_step_limit)
    behind = before.clone()
    order = torch.arange(len(slots), device=slots.device)
    out = scan(*row, cu_seqlens, kv_lens, order, info, behind, time_step_limit, chunk_size)
    is_long = new > most
    states[slots] = torch.where(is_long.view(-1, 1, 1, 1), behind, before)
    begins[slots] = torch.where(is_long, kv_lens, start).to(begins.dtype).unsqueeze(1)
    places = cu_seqlens[: len(slots), None] + torch.arange(most, device=slots.device)
    places = places.clamp(max=row[0].shape[1] - 1)
    for cache, tensor in zip((xs, bs, dts), (row[0], row[2], row[5]), strict=True):
        cache[slots] = tensor[0][places]
    return out


def fast_forward(
    caches: tuple[Tensor, ...],
    slots: Tensor,
    start: Tensor,
    row: tuple[Tensor, ...],
    time_step_limit: list[float],
) -> Tensor:
    """Return the states that sequences have after `start` tokens, [sequences, heads, head_dim,
    state].

    Tokens of the last step from there on take no time, and so change nothing: the others are one
        product.
    """
    states, xs, bs, dts, begins = (cache[slots] for cache in caches)
    _, A, _, _, _, _, dt_bias = row
    count = start - begins[:, 0]
    wide = wide_dtype(xs)
    steps = F.softplus(dts + dt_bias.to(dts.dtype)).clamp(*time_step_limit).to(wide)
    counts = torch.arange(xs.shape[1], device=slots.device) < count[:, None]
    steps = torch.where(
        counts.unsqueeze(-1), steps, torch.zeros((), dtype=wide, device=steps.device)
    )
    heads = xs.shape[2]
    inputs = torch.where(counts[..., None, None], xs.to(wide) * steps.unsqueeze(-1), 0.0)
    keys = torch.where(counts[..., None, None], bs.to(wide), 0.0).repeat_interleave(
        heads // bs.shape[2], dim=2
    )
    moved = decaying_chunk(inputs, A.to(wide) * steps, keys, torch.zeros_like(keys), states)[1]
    return torch.where(
        (start == 0).view(-1, 1, 1, 1),
        torch.zeros((), dtype=moved.dtype, device=moved.device),
        moved,
    )

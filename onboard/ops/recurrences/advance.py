"""Recurrences over a flat row of tokens of several sequences, each with a state of its own in a
cache of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[..., tuple[Tensor, Tensor]]
"""(state [batch, ...], inputs [batch, tokens, ...]...) -> outputs [batch, tokens, ...], state
behind them.
"""


def advance(
    step: Step,
    inputs: Sequence[Tensor],
    out: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    cache: Tensor,
) -> Tensor:
    """Run a recurrence over the row; return `out`.

    A sequence whose tokens are all in this row begins with a state of zeros, so that slots need no
    clearing. A decode step is one batch of all sequences and reads nothing back from the device;
    others go from sequence to sequence.

    Args:
        step: one recurrence of sequences of one length.
        inputs: [1, tokens, ...] each.
        out: [1, tokens, ...], written to; zeros stay for tokens beyond the last sequence.
        cu_seqlens: [sequences + 1] int32, where each sequence's new tokens start.
        kv_lens: [sequences] int32, tokens of each sequence, the new ones included.
        state_slots: [sequences] int64, where in the cache each state lies; padding has slot 0.
        batch_info_host: [5] int32 on the CPU: sequences, tokens, longest query, longest sequence.
        cache: [slots, ...], written to.
    """
    sequences, _, longest_query, *_ = batch_info_host.tolist()
    if longest_query == 1:
        new = (kv_lens == 1).view(-1, *[1] * (cache.dim() - 1))
        state = torch.where(
            new, torch.zeros((), dtype=cache.dtype, device=cache.device), cache[state_slots]
        )
        outputs, state = step(state, *(each.transpose(0, 1) for each in inputs))
        cache.index_copy_(0, state_slots, state.to(cache.dtype))
        return out.copy_(outputs.transpose(0, 1))
    starts, lengths, slots = cu_seqlens.tolist(), kv_lens.tolist(), state_slots.tolist()
    for index in range(sequences):
        rows, slot = slice(starts[index], starts[index + 1]), slice(slots[index], slots[index] + 1)
        is_new = lengths[index] == rows.stop - rows.start
        state = torch.zeros_like(cache[slot]) if is_new else cache[slot].clone()
        out[:, rows], state = step(state, *(each[:, rows] for each in inputs))
        cache[slot] = state
    return out

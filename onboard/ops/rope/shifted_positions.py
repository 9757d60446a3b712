"""Positions that a sequence's images have moved: an image takes fewer of them than it has tokens,
or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import register_op


@register_op(lambda position_ids, *_: torch.empty_like(position_ids), inserted=True)
def torch_shifted_positions(
    position_ids: Tensor, cu_seqlens: Tensor, state_slots: Tensor, mrope_delta_cache: Tensor
) -> Tensor:
    """Add to each token's position what the cache has for its sequence.

    Args:
        position_ids: [1, tokens] int64.
        cu_seqlens: [sequences + 1] int32, where each sequence's new tokens start.
        state_slots: [sequences] int64, where in the cache each sequence's number lies; padding has
            slot 0.
        mrope_delta_cache: [slots, 1] int64.

    Returns:
        [1, tokens] int64; tokens beyond the last sequence are moved with it.
    """
    tokens = torch.arange(position_ids.shape[1], device=position_ids.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True).clamp(
        max=len(state_slots) - 1
    )
    return position_ids + mrope_delta_cache[state_slots[sequence], 0]

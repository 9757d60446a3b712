"""Rotations of queries and keys as attention does them that rotates by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onboard.ops.rope.fused_rope import (
    torch_rope_cached,
    torch_rope_deinterleaved,
    torch_rope_pairs,
)

Turn = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch_rope_pairs(q, k, torch.complex(cos.float(), sin.float()))


TURNS: dict[str, Turn] = {
    "rope_cached": torch_rope_cached,
    "rope_deinterleaved": torch_rope_deinterleaved,
    "rope_pairs": _pairs,
}
"""What an op's `fused_form` names, of queries and keys [batch, sequence, heads, head_dim] and the
tables cos and sin [batch, sequence, size], for "rope_pairs" [batch, sequence, size / 2].
"""

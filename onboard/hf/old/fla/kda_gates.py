"""The decays of Kimi delta attention, as flash-linear-attention makes them of gates."""

from __future__ import annotations

import torch
from torch import nn


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor,
    head_k_dim: int | None = None,
    g_bias: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logarithm of the decay of each channel, -exp(A_log) softplus(g + bias), [...,
    heads, key size]; g is like that, or flat where `head_k_dim` is given.
    """
    flat = g.flatten(-2) if head_k_dim is None else g
    bias = g_bias if dt_bias is None else dt_bias
    flat = flat if bias is None else flat + bias
    steps = _wide(flat).reshape(*flat.shape[:-1], A_log.numel(), -1)
    steps = nn.functional.softplus(steps)
    return -_wide(A_log).flatten().exp().unsqueeze(-1) * steps


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))

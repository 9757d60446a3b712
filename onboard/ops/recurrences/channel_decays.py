"""How much of a token is left at a later one where each channel forgets at a rate of its own.

What decays add up to between two tokens is summed from the one to the other: differences of sums from
the beginning would lose what is small behind a strong one, or be none of two infinities.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def until(seen: Tensor, before: int) -> Tensor:
    """Return [batch, heads, tokens, tokens, channels]: what is left at each token, or at the one
    `before` it (1), of each other one that is not later; anything of later ones.

    Args:
        seen: logarithms of the decays [batch, heads, tokens, channels], moved by `before` tokens.
        before: how far back a token finds the state.
    """
    every = torch.ones(seen.shape[2], seen.shape[2], dtype=torch.bool, device=seen.device)
    between = seen.unsqueeze(3).expand(-1, -1, -1, seen.shape[2], -1)
    return between.masked_fill(every.triu(-before).unsqueeze(-1), 0).cumsum(2).exp()


def until_end(decay: Tensor) -> Tensor:
    """Return, like decay, what is left of each token behind the last one."""
    return moved(decay.flip(2), 1).cumsum(2).flip(2).exp()


def moved(x: Tensor, tokens: int) -> Tensor:
    """Return [batch, heads, tokens, size] by so many tokens later, with zeros in front."""
    return F.pad(x, (0, 0, tokens, 0))[:, :, : x.shape[2]]

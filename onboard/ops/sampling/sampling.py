"""The choice of each row's next token from its logits, without a look at the values on the host.

A token is drawn by inverting the cumulative distribution, in the order of token ids, at one uniform
number a row. These numbers are counter-based (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"): they follow from a request's key and the place of the token, whatever else is in the
batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NOT_A_TOKEN = -1
"""What is chosen from logits that are NaN or infinite."""


def uniforms(
    keys: npt.NDArray[np.uint64], counters: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), number `counters` of the stream of each key: SplitMix64 (Steele et
    al. 2014).
    """
    z = keys + counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    leading = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    numbers: npt.NDArray[np.float64] = leading.astype(np.float64) * 2.0**-53
    return numbers


def choose_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    *,
    drawn: bool = True,
    filtered: bool = True,
) -> Tensor:
    """Return the next token of each row of `logits` [rows, vocabulary]: int64 [rows].

    The rest has an entry a row. `temperature` 0 takes the likeliest token, the one with the lowest
    id among equals. Min-p, then top-k (0: all), then top-p each keep some of what the one before
    left; ties keep the lower id. `drawn` and `filtered` False promise that no row has a
    temperature, or a filter. `NOT_A_TOKEN` for logits that are not finite.
    """
    largest, tokens = logits.max(dim=-1)  # a NaN counts as largest
    if drawn:
        heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
        scaled = (logits.float() - largest.float()[:, None]) / heat
        weights = scaled.exp()
        if filtered:
            weights = weights * _kept(scaled, top_k[:, None], top_p[:, None], min_p[:, None])
        tokens = torch.where(temperature > 0, _invert(weights, uniform), tokens)
    return torch.where(largest.isfinite(), tokens, NOT_A_TOKEN)


def _kept(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens the filters keep."""
    values, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    weights = values.exp()  # of the likeliest: 1
    keep = (weights >= min_p) & ((top_k <= 0) | (ranks < top_k))
    weights = weights.masked_fill(~keep, 0.0).double()
    before = weights.cumsum(-1) - weights
    keep &= (before < top_p * weights.sum(-1, keepdim=True)) | (ranks == 0)
    return torch.zeros_like(keep).scatter(-1, order, keep)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row the index at which its cumulated weights pass `uniform` times their
    sum.
    """
    cumulated = weights.double().cumsum(-1)
    # Less than the sum: 1 - 2^-53 times a number is never rounded to it
    target = uniform[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, target, right=True)[:, 0]

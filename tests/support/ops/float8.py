"""How far attention over a cache of float8_e4m3fn may be from attention over the keys and values
themselves.

The format has 4 significant bits down to 2^-6 and steps of 2^-9 below, and ends at 448
(Micikevicius et al. 2022, arXiv:2209.05433), so x is stored with an error of at most max(|x| / 16,
2^-10), or |x| - 448 beyond the end. A change of all logits by at most e changes every weight by a
factor between exp(-2 e) and exp(2 e).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.ops.naive import Batch


def rounding(x: Tensor, steps: float) -> Tensor:
    """The largest error with which each element is stored, when that is `steps` steps of the
    format.
    """
    size = x.double().abs()
    return torch.where(size > 448, size - 448, (size / 8).clamp(min=2**-9) * steps)


def exact_and_bound(batch: Batch, *, steps: float = 0.5) -> tuple[Tensor, Tensor]:
    """Causal attention in float64 and how far each element of it may be off, [1, tokens, heads,
    value_dim] both.

    `steps` is 0.5 where numbers are rounded to the nearest, 1 where they are truncated.
    """
    parts = [_of_sequence(each.query, each.key, each.value, steps) for each in batch.sequences]
    exact, bound = (torch.cat(each)[None] for each in zip(*parts, strict=True))
    return exact, bound


def _of_sequence(query: Tensor, key: Tensor, value: Tensor, steps: float) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    q, k, v = (
        query.double(),
        *(each.double().repeat_interleave(group, dim=1) for each in (key, value)),
    )
    position = torch.arange(len(key) - len(query), len(key))
    unseen = torch.arange(len(key)) > position[:, None]
    scale = q.shape[-1] ** -0.5
    logits = torch.einsum("qnd,knd->nqk", q, k).mul(scale).masked_fill(unseen, -torch.inf)
    moved = (
        torch.einsum("qnd,knd->nqk", q.abs(), rounding(k, steps))
        .mul(scale)
        .masked_fill(unseen, 0)
        .amax(-1)
    )
    weights = logits.softmax(-1)
    of_value = rounding(v, steps)
    exact, of_values, size = (
        torch.einsum("nqk,knd->qnd", weights, each) for each in (v, of_value, v.abs() + of_value)
    )
    return exact, of_values + torch.expm1(2 * moved).mT[..., None] * size

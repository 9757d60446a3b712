"""Attention behind a rotation, element by element, in float64; and arguments of the ops for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.support.ops.naive import Batch, Sequence, make_batch

TURNS = ("rope_cached", "rope_deinterleaved", "rope_pairs")


def tables(tokens: int, size: int, turns: str) -> tuple[Tensor, Tensor]:
    """Random tables [1, tokens, size], or of half the size."""
    angle = torch.rand(1, tokens, size // 2) * 6.28
    if turns == "rope_pairs":
        both = torch.view_as_real(torch.polar(torch.ones_like(angle), angle))
        return both[..., 0], both[..., 1]
    both = angle.repeat(1, 1, 2)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, turns: str) -> Tensor:
    """Rotate x [tokens, heads, dim] by tables [tokens, size], channel by channel."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    out, half = x.clone(), cos.shape[-1] // (1 if turns == "rope_pairs" else 2)
    for pair in range(half):
        places = (pair, pair + half) if turns == "rope_cached" else (2 * pair, 2 * pair + 1)
        first, second = (x[..., place] for place in places)
        a, b = cos[:, pair, None], sin[:, pair, None]
        into = (2 * pair, 2 * pair + 1) if turns == "rope_pairs" else (pair, pair + half)
        out[..., into[0]], out[..., into[1]] = first * a - second * b, second * a + first * b
    return out


EPS = 1e-2
"""Of norms of heads: as large as to be seen."""


def normalise(x: Tensor, weight: Tensor | None) -> Tensor:
    """Divide x [tokens, heads, dim] by each head's root mean square; None leaves it as it is."""
    x = x.double()
    if weight is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def with_rotation(
    lengths: list[tuple[int, int]], turns: str, size: int, flat: bool, normed: bool = False, **shapes: Any
) -> tuple[Batch, list[Any], dict[str, Any], Batch]:  # fmt: skip
    """Return a batch that is not rotated, nor `normed`, the arguments of a cached op for it, positional
    and named, and the batch as it is behind both, in float64; what is cached is so already.
    """
    batch = make_batch(lengths, **shapes)
    tokens, dim = batch.query.shape[1], batch.query.shape[3]
    cos, sin = tables(tokens, size, turns)
    q_norm, k_norm = (torch.randn(dim) if normed else None for _ in range(2))
    starts = batch.cu_seqlens.tolist()
    turned = []
    for sequence, start in zip(batch.sequences, starts, strict=False):
        rows = slice(start, start + len(sequence.query))
        row = (cos[0, rows], sin[0, rows], turns)
        old = len(sequence.key) - len(sequence.query)
        new = rotate(normalise(sequence.key[old:], k_norm), *row)
        query = rotate(normalise(sequence.query, q_norm), *row)
        turned.append(
            Sequence(query, torch.cat([sequence.key[:old].double(), new]), sequence.value)
        )
    caches = {"k_cache": batch.k_cache.double(), "v_cache": batch.v_cache.double()}
    tensors, heads = [batch.query, batch.key, batch.value], None
    if flat:
        heads = [batch.query.shape[2], batch.key.shape[2], batch.query.shape[3]]
        tensors = [torch.cat([each.flatten(2) for each in tensors], -1)] * 3
    args = [*tensors, cos, sin, *batch.arguments()[3:]]
    named: dict[str, Any] = {"turns": turns, "heads": heads}
    if normed:
        named |= {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": EPS}
    return batch, args, named, replace(batch, sequences=turned, **caches)

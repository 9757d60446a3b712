"""Arguments of cached recurrences that only some models have, for rows of `tests.support.ops.ragged`."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.ops.ragged import STATE, Row, randn, slots


def kda(
    row: Row,
    heads: int,
    key: int,
    value: int,
    normalise: bool,
    dtype: torch.dtype = torch.float32,
    strength: float = 1.0,
) -> list[Any]:
    """Arguments of a cached Kimi Delta Attention; its decays are float32, whatever the rest is."""
    shapes = [(heads, key), (heads, key), (heads, value), (heads,)]
    q, k, v, beta = (randn(1, row.tokens, *shape, dtype=dtype) for shape in shapes)
    k = k if normalise else (k * key**-0.5).to(dtype)
    g = -strength * randn(1, row.tokens, heads, key).abs()
    scale = None if normalise else 0.4
    cache = slots(heads, key, value)
    return [q, k, v, g, beta.sigmoid(), *row.metadata(*STATE), cache, scale, normalise]


def lightning(
    row: Row, heads: int, key: int, value: int, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Arguments of a cached lightning attention; one head forgets nothing."""
    q, k, v = (randn(1, row.tokens, heads, size, dtype=dtype) for size in (key, key, value))
    slopes = randn(heads).abs()
    slopes[0] = 0
    return [q, k, v, slopes, *row.metadata(*STATE), slots(heads, value, key)]


def linear_recurrence(row: Row, channels: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Arguments of a cached linear recurrence, slices of a wider projection; some tokens start anew."""
    x, decay = (
        randn(1, row.tokens, channels + 3, dtype=dtype)[..., 2 : channels + 2] for _ in range(2)
    )
    decay = decay.sigmoid() * (randn(1, row.tokens, channels) > -1.5)
    return [x, decay.to(dtype), *row.metadata(*STATE), slots(channels)]


def wkv(
    row: Row, channels: int, dtype: torch.dtype = torch.float32, strength: float = 1.0
) -> list[Any]:
    """Arguments of a cached WKV; of a state the second row, a sum of weights, is at least one."""
    key, value = (randn(1, row.tokens, channels, dtype=dtype) for _ in range(2))
    cache = slots(3, channels)
    cache[:, 1] = 1 + cache[:, 1].abs()
    weights = [randn(channels, dtype=dtype) for _ in range(2)]
    return [(strength * key).to(dtype), value, *weights, *row.metadata(*STATE), cache]


def token_shift(row: Row, channels: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Arguments of a cached token shift."""
    x = randn(1, row.tokens, channels + 3, dtype=dtype)[..., 2 : channels + 2]
    return [x, *row.metadata(*STATE), slots(channels, dtype=dtype)]


def mlstm(
    row: Row,
    heads: int,
    key: int,
    value: int,
    dtype: torch.dtype = torch.float32,
    strength: float = 1.0,
    eps: float = 0.3,
) -> list[Any]:
    """Arguments of a cached matrix LSTM; the last row of a state is one number, m. Without much of
    an epsilon a divisor may have cancelled.
    """
    shapes = [(heads, key), (heads, key), (heads, value), (heads,), (heads,)]
    q, k, v, igate, fgate = (randn(1, row.tokens, *shape, dtype=dtype) for shape in shapes)
    cache = slots(heads, key + 1, value + 1)
    cache[:, :, -1] = cache[:, :, -1, :1]
    gates = [(strength * (igate - 1)).to(dtype), fgate]
    return [q, k, v, *gates, *row.metadata(*STATE), cache, eps]

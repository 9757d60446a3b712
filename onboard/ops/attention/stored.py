"""Keys and values as a cache holds them, and results as the layer behind reads them: rounded to its
dtype, divided by a scale if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def as_stored(tokens: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return tokens [..., heads, dim] rounded to a cache's dtype, divided by `scale` before.

    float8_e4m3fn has no infinity; what is larger than its largest number, 448, becomes that. Without
    a scale it keeps values as they are: keys and values are of the order of one, where its steps are
    as fine as anywhere.
    """
    if scale is not None:
        tokens = tokens.float() / scale.view(-1, 1)
    if dtype == torch.float8_e4m3fn:
        most = torch.finfo(dtype).max
        tokens = tokens.clamp(-most, most)
    return tokens.to(dtype)


def as_read(stored: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return stored tokens [..., heads, tokens, dim] in the dtype of the activations, times
    `scale`.
    """
    if scale is None:
        return stored.to(dtype)
    return (stored.float() * scale.view(-1, 1, 1)).to(dtype)


def as_cached(tokens: Tensor, scale: Tensor | None) -> Tensor:
    """Return tokens [..., heads, tokens, dim] as a cache of float8_e4m3fn with this scale gives them
    back; without one they are as they were.
    """
    if scale is None:
        return tokens
    heads = tokens.transpose(-3, -2)
    stored = as_stored(heads, torch.float8_e4m3fn, scale).transpose(-3, -2)
    return as_read(stored, tokens.dtype, scale)


def as_output(mixed: Tensor, out_scale: Tensor | None) -> Tensor:
    """Return attention's result in float8_e4m3fn, divided by `out_scale` [1]; without one as it is."""
    return mixed if out_scale is None else as_stored(mixed, torch.float8_e4m3fn, out_scale)


def fake_output(
    query: Tensor, value: Tensor, rest: Sequence[object], keywords: Mapping[str, object], most: int
) -> Tensor:
    """Return attention's empty result; of `most` arguments behind query, key and value the last one
    is `out_scale`.
    """
    given = rest[-1] if len(rest) == most else keywords.get("out_scale")
    dtype = query.dtype if given is None else torch.float8_e4m3fn
    return query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=dtype)

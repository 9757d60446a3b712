"""Where a caller wants the result of an op: memory that a captured piece behind it reads.

An op that finds its result there needs no copy afterwards. It is a wish: one that allocates in
another way leaves the memory as it is, and the caller copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_WANTED: ContextVar[Tensor | None] = ContextVar("wanted", default=None)


@contextmanager
def results_at(place: Tensor | None) -> Iterator[None]:
    """Let the next op that asks have its result in `place`, any shape, if it fits."""
    token = _WANTED.set(place)
    try:
        yield
    finally:
        _WANTED.reset(token)


def placed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor, where it is wanted if that has as many numbers of the dtype,
    on the device and without gaps; one op alone gets the memory.
    """
    place = _WANTED.get()
    if (
        place is None
        or place.numel() != math.prod(shape)
        or (place.dtype, place.device) != (dtype, device)
        or not place.is_contiguous()
    ):
        return torch.empty(shape, dtype=dtype, device=device)
    _WANTED.set(None)
    return place.view(shape)


def output_rows(
    shape: tuple[int, ...], dtype: torch.dtype, batch_info_host: Tensor, device: torch.device
) -> Tensor:
    """Return an output [tokens, ...] in which the rows of no sequence are zeros.

    A decode batch has no such rows, it is padded with whole sequences.
    """
    sequences, real, longest_query, *_ = batch_info_host.tolist()
    out = placed(shape, dtype, device)
    if longest_query > 1 or shape[0] != sequences:
        out[real:] = 0
    return out


def is_placed(result: Tensor, place: Tensor) -> bool:
    """Whether a result is what lies at a place, number for number; neither has gaps then."""
    return (
        result.data_ptr() == place.data_ptr()
        and result.shape == place.shape
        and result.dtype == place.dtype
        and result.is_contiguous()
        and place.is_contiguous()
    )

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Rotation of queries and keys while attention's kernels load them, where a sequence has one token."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

HALF, DEINTERLEAVED, PAIRS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FORMS = {"rope_cached": 1, "rope_deinterleaved": 2, "rope_pairs": 3}
"""Keys of `TURNS` as kernels know them; 0 is no rotation."""


class HeadNorms(NamedTuple):
    """RMSNorms of queries' and keys' heads: weights [head_dim], and what is added to the mean square."""

    query: Tensor
    key: Tensor
    eps: float


class Rotation(NamedTuple):
    """A rotation's tables [1, tokens, size], what turns together, as a key of `TURNS`, and the norms before
    it, which halves alone have.
    """

    cos: Tensor
    sin: Tensor
    turns: str
    norms: HeadNorms | None = None

    @property
    def size(self) -> int:
        """How many channels of a head turn."""
        return self.cos.shape[-1] * (2 if self.turns == "rope_pairs" else 1)


def decoding_rotation(
    rotation: Rotation | None,
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[int, int], dict[str, int]]:
    """Return what a kernel of one token a sequence takes: tables, how far apart their rows are, and
    its constants.
    """
    if rotation is None:
        return (None, None), (0, 0), {}
    cos, sin, turns, _ = rotation
    if cos.stride(-1) != sin.stride(-1):
        cos, sin = cos.contiguous(), sin.contiguous()
    turning = {"SIZE": rotation.size, "STEP": cos.stride(-1), "TURNS": FORMS[turns]}
    return (cos, sin), (cos.stride(1), sin.stride(1)), turning


@triton.jit
def load_turned(
    x_ptr, channel, inside, cos_ptr, sin_ptr, SIZE: tl.constexpr, STEP: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """Load channels of heads, those below SIZE rotated by one row of the tables; in their dtype.

    `x_ptr` points to each head's first channel, and is broadcast against `channel`. A channel's
    result needs two: itself, or where it comes from, and the one that it turns with.
    """
    turns = channel < SIZE
    if TURNS == HALF:
        first = channel < SIZE // 2
        source = channel
        other = tl.where(first, channel + SIZE // 2, channel - SIZE // 2)
        place = channel
    elif TURNS == DEINTERLEAVED:
        first = channel < SIZE // 2
        source = tl.where(first, 2 * channel, 2 * channel - SIZE + 1)
        other = tl.where(first, 2 * channel + 1, 2 * channel - SIZE)
        place = channel
    else:
        first = channel % 2 == 0
        source = channel
        other = tl.where(first, channel + 1, channel - 1)
        place = channel // 2
    own = tl.load(x_ptr + tl.where(turns, source, channel), mask=inside, other=0.0)
    dtype = own.dtype
    beside = tl.load(x_ptr + other, mask=inside & turns, other=0.0)
    cos = tl.load(cos_ptr + place * STEP, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + place * STEP, mask=turns, other=0.0)
    if TURNS != PAIRS:  # tables are cast to the dtype of what they turn, as in the reference
        cos, sin = cos.to(dtype), sin.to(dtype)
    sin = sin.to(tl.float32)
    sin = tl.where(first, -sin, sin)
    return (own.to(tl.float32) * cos.to(tl.float32) + beside.to(tl.float32) * sin).to(dtype)

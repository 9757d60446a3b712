# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""A linear layer with weights of four-bit integers over one token, whole rows at a time.

A thread has four neighbouring words (16 bytes) of a row, a quad: of each sixteen inputs of a run
four neighbours. A program has all inputs of its rows, so a thread has the same inputs in each of
them: it normalises, enlarges and adds them up once and keeps them in registers. Then it goes from
row to row, and asks for the next words before it multiplies those that it has. What stands around
the layer is as in `linear_kernels.vector_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.four_bits.four_bits import RUN as _RUN
from onboard.ops.four_bits.four_bits import ZERO as _ZERO
from onboard.ops.linear.linear_kernels import finish, weight_rows
from onboard.ops.triton.overlap import wait_for_inputs

RUN, ZERO = tl.constexpr(_RUN), tl.constexpr(float(_ZERO))
QUAD = tl.constexpr(_RUN // 4)
"""Inputs of a quad."""
_PLANES = tl.constexpr(8)
_CODE, _TWO = tl.constexpr(15), tl.constexpr(2.0)
_BACK = tl.constexpr(2.0**60)
"""What sums of products are multiplied by: codes are read as tiny numbers, for which inputs are
made large.
"""


@triton.jit
def _codes(words, PLANE: tl.constexpr):
    """Return the codes in a plane of words as float32, times a power of two (`_enlarged`): in the bits
    p to p + 3 of a mantissa, with no exponent, a code is itself times 2^(p - 149).
    """
    if PLANE < 5:
        bits = words & (_CODE << 4 * PLANE)
    else:
        bits = (words >> 12) & (_CODE << 4 * PLANE - 12)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _enlarged(x, PLANE: tl.constexpr):
    """Return x times the power of two that makes its products with `_codes` 2^-60 of what they are."""
    if PLANE < 5:
        return x * _TWO ** (89 - 4 * PLANE)
    else:
        return x * _TWO ** (101 - 4 * PLANE)


@triton.jit
def _input(x_ptr, norm_ptr, k, inputs, factor, HAS_NORM: tl.constexpr):
    """Return inputs in float32, normalised, and rounded as between separate steps."""
    x = tl.load(x_ptr + k, mask=k < inputs, other=0.0)
    if HAS_NORM:
        weight = tl.load(norm_ptr + k, mask=k < inputs, other=0.0)
        scaled = (x.to(tl.float32) * factor).to(x.dtype).to(tl.float32)
        x = (scaled * weight.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _norm_factor(x_ptr, column, inputs, eps):
    """Return what an RMSNorm multiplies its whole input by."""
    squares = tl.zeros(column.shape, tl.float32)
    for plane in tl.static_range(_PLANES):
        k = column + 16 * plane
        x = tl.load(x_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / inputs + eps)


@triton.jit
def _row_parts(w_ptr, scale_ptr, zero_ptr, row, quad, quads, groups, group, HAS_ZERO: tl.constexpr):
    """Return the words [rows, quads, 4] of rows, their scales and codes of zero [rows, quads]."""
    word = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    place = (row.to(tl.int64) * (quads * 4))[:, None, None] + word[None, :, :]
    words = tl.load(w_ptr + place, mask=(quad < quads)[None, :, None], other=0)
    share = row[:, None] * groups + group[None, :]
    scale = tl.load(scale_ptr + share)
    zero = tl.load(zero_ptr + share) if HAS_ZERO else scale
    return words, scale, zero


@triton.jit
def four_bit_rows_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, residual_ptr, norm_ptr, scale_ptr, zero_ptr,
    outputs, inputs, groups, tiles, eps,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BN: tl.constexpr, Q: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes tiles of BN rows in turn; Q quads are all of a row."""
    tile = tl.program_id(0)
    GATED: tl.constexpr = ACTIVATION is not None
    quads = tl.cdiv(inputs, RUN) * (RUN // QUAD)
    quad = tl.arange(0, Q)
    first = quad // 4 * RUN
    group = tl.minimum(first, inputs - 1) // GROUP
    row = weight_rows(tile, outputs, GATED, BN)
    words, scale, zero = _row_parts(
        w_ptr, scale_ptr, zero_ptr, row, quad, quads, groups, group, HAS_ZERO
    )
    wait_for_inputs(OVERLAP)
    column = (first + quad % 4 * 4)[:, None] + tl.arange(0, 4)[None, :]
    factor = _norm_factor(x_ptr, column, inputs, eps) if HAS_NORM else 1.0
    x0 = _input(x_ptr, norm_ptr, column, inputs, factor, HAS_NORM)
    x1 = _input(x_ptr, norm_ptr, column + 16, inputs, factor, HAS_NORM)
    x2 = _input(x_ptr, norm_ptr, column + 32, inputs, factor, HAS_NORM)
    x3 = _input(x_ptr, norm_ptr, column + 48, inputs, factor, HAS_NORM)
    x4 = _input(x_ptr, norm_ptr, column + 64, inputs, factor, HAS_NORM)
    x5 = _input(x_ptr, norm_ptr, column + 80, inputs, factor, HAS_NORM)
    x6 = _input(x_ptr, norm_ptr, column + 96, inputs, factor, HAS_NORM)
    x7 = _input(x_ptr, norm_ptr, column + 112, inputs, factor, HAS_NORM)
    total = tl.sum(x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7, 1)
    x0, x1, x2, x3 = _enlarged(x0, 0), _enlarged(x1, 1), _enlarged(x2, 2), _enlarged(x3, 3)
    x4, x5, x6, x7 = _enlarged(x4, 4), _enlarged(x5, 5), _enlarged(x6, 6), _enlarged(x7, 7)
    while tile < tiles:
        later = tile + tl.num_programs(0)
        later_row = weight_rows(tl.minimum(later, tiles - 1), outputs, GATED, BN)
        later_words, later_scale, later_zero = _row_parts(
            w_ptr, scale_ptr, zero_ptr, later_row, quad, quads, groups, group, HAS_ZERO
        )
        sums = _codes(words, 0) * x0[None, :, :]
        sums += _codes(words, 1) * x1[None, :, :]
        sums += _codes(words, 2) * x2[None, :, :]
        sums += _codes(words, 3) * x3[None, :, :]
        sums += _codes(words, 4) * x4[None, :, :]
        sums += _codes(words, 5) * x5[None, :, :]
        sums += _codes(words, 6) * x6[None, :, :]
        sums += _codes(words, 7) * x7[None, :, :]
        of_zero = zero.to(tl.float32) if HAS_ZERO else ZERO
        products = (tl.sum(sums, 2) * _BACK - of_zero * total[None, :]) * scale.to(tl.float32)
        finish(
            tl.sum(products, 1)[:, None], out_ptr, bias_ptr, residual_ptr, tile, row, tl.arange(0, 1), 1, outputs,
            ACTIVATION, HAS_BIAS, HAS_RESIDUAL, 1, BN,
        )  # fmt: skip
        tile, row = later, later_row
        words, scale, zero = later_words, later_scale, later_zero

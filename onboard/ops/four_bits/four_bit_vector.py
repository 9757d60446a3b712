# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""A linear layer with four-bit weights over one token: no tensor core has work there, and each code
is taken out of its word by the instructions that multiply it.

A thread has four neighbouring words (16 bytes), a quad: of each sixteen inputs of a run four
neighbours. What all rows of the weight need of the inputs is computed once, by a kernel before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.four_bits.four_bit_kernels import scale_values
from onboard.ops.four_bits.four_bits import RUN as _RUN
from onboard.ops.four_bits.four_bits import ZERO as _ZERO
from onboard.ops.linear.linear_kernels import finish, weight_rows
from onboard.ops.triton.overlap import wait_for_inputs

RUN, ZERO = tl.constexpr(_RUN), tl.constexpr(float(_ZERO))
QUADS = tl.constexpr(4)
"""Of a run."""
PLANES = tl.constexpr(8)
_CODE, _TWO = tl.constexpr(15), tl.constexpr(2.0)
_BACK = tl.constexpr(2.0**60)
"""What sums of products are multiplied by: codes are read as tiny numbers, for which inputs are
made large.
"""


@triton.jit
def _codes(words, PLANE: tl.constexpr, E2M1: tl.constexpr):
    """Return the codes in a plane of words as float32, times a power of two (`_enlarged`).

    An integer in the bits p to p + 3 of a mantissa, with no exponent, is itself times 2^(p - 149).
    Of a float the sign goes to the sign, its other bits to the last of the exponent and the first
    of the mantissa: itself times 2^-126.
    """
    if E2M1:
        # The last shift copies the sign into bits that are then masked
        bits = ((words << (28 - 4 * PLANE)) >> 6) & -0x7E400000
    elif PLANE < 5:
        bits = words & (_CODE << 4 * PLANE)
    else:
        bits = (words >> 12) & (_CODE << 4 * PLANE - 12)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _enlarged(x, PLANE: tl.constexpr, E2M1: tl.constexpr):
    """Return x times the power of two that makes its products with `_codes` 2^-60 of what they are."""
    if E2M1:
        return x * 2.0**66
    elif PLANE < 5:
        return x * _TWO ** (89 - 4 * PLANE)
    else:
        return x * _TWO ** (101 - 4 * PLANE)


@triton.jit
def _group(scale_ptr, zero_ptr, first, inputs, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Return the scales [BN, Q] of the groups that the inputs `first` [Q] belong to, and their
    zeros' codes.
    """
    group = (tl.minimum(first, inputs - 1) // GROUP)[None, :]
    scale = scale_values(tl.load(scale_ptr[:, None] + group))
    if HAS_ZERO:
        zero = tl.load(zero_ptr[:, None] + group).to(tl.float32)
    else:
        zero = ZERO
    return scale, zero


@triton.jit
def spread_kernel(
    planes_ptr, totals_ptr, x_ptr, norm_ptr, inputs, quads, eps,
    HAS_NORM: tl.constexpr, E2M1: tl.constexpr, PARTS: tl.constexpr, Q: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write one token's inputs, normalised and enlarged, in the order of words: [8, words] float32;
    and the sum of each quad's in each of the PARTS of a run that have a scale: [PARTS, quads].
    """
    quad = tl.program_id(0) * Q + tl.arange(0, Q)
    i = tl.arange(0, 4)
    EACH: tl.constexpr = PLANES // PARTS
    wait_for_inputs(OVERLAP)
    factor = 1.0
    if HAS_NORM:
        squares = tl.zeros([BK], tl.float32)
        for start in range(0, inputs, BK):
            k = start + tl.arange(0, BK)
            x = tl.load(x_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)
            squares += x * x
        factor = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    column = (quad // QUADS * RUN + quad % QUADS * 4)[:, None] + i[None, :]
    word, inside = quad[:, None] * 4 + i[None, :], (quad < quads)[:, None]
    for part in tl.static_range(PARTS):
        total = tl.zeros([Q, 4], tl.float32)
        for plane in tl.static_range(part * EACH, part * EACH + EACH):
            k = column + 16 * plane
            x = tl.load(x_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)
            if HAS_NORM:
                x *= factor * tl.load(norm_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)
            total += x
            place = planes_ptr + plane * (quads * 4) + word
            tl.store(place, _enlarged(x, plane, E2M1), mask=inside)
        tl.store(totals_ptr + part * quads + quad, tl.sum(total, 1), mask=quad < quads)


@triton.jit
def _take_quads(
    sums, words, planes_ptr, totals_ptr, scale_ptr, zero_ptr, quad, quads, inputs,
    E2M1: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Add the products of some quads [BN, Q, 4] to the sums [BN, Q]."""
    EACH: tl.constexpr = PLANES // PARTS
    first = quad // QUADS * RUN
    word, inside = quad[:, None] * 4 + tl.arange(0, 4)[None, :], quad < quads
    for part in tl.static_range(PARTS):
        products = tl.zeros([BN, Q, 4], tl.float32)
        for plane in tl.static_range(part * EACH, part * EACH + EACH):
            place = planes_ptr + plane * (quads * 4) + word
            x = tl.load(place, mask=inside[:, None], other=0.0)
            products += _codes(words, plane, E2M1) * x[None, :, :]
        scale, zero = _group(scale_ptr, zero_ptr, first + part * GROUP, inputs, GROUP, HAS_ZERO)
        if E2M1:
            sums += tl.sum(products, 2) * _BACK * scale
        else:
            total = tl.load(totals_ptr + part * quads + quad, mask=inside, other=0.0)
            sums += (tl.sum(products, 2) * _BACK - zero * total[None, :]) * scale
    return sums


@triton.jit
def four_bit_vector_kernel(
    out_ptr, planes_ptr, totals_ptr, w_ptr, bias_ptr, residual_ptr, scale_ptr, zero_ptr, whole_ptr,
    outputs, inputs, groups,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    E2M1: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_WHOLE: tl.constexpr,
    PARTS: tl.constexpr, BN: tl.constexpr, Q: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes BN products of what `spread_kernel` wrote, Q quads of each at a time; the
    words of the next ones are asked for before those are multiplied, the first before the input is
    waited for.
    """
    tile = tl.program_id(0)
    weight_row = weight_rows(tile, outputs, ACTIVATION is not None, BN)
    wide = weight_row.to(tl.int64)
    quads = tl.cdiv(inputs, RUN) * QUADS
    q = tl.arange(0, Q)
    word = q[:, None] * 4 + tl.arange(0, 4)[None, :]
    quad_ptr = w_ptr + (wide * (quads * 4))[:, None, None] + word[None, :, :]
    scales_ptr = scale_ptr + wide * groups
    zeros_ptr = zero_ptr + wide * groups if HAS_ZERO else scale_ptr
    words = tl.load(quad_ptr, mask=(q < quads)[None, :, None], other=0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros([BN, Q], tl.float32)
    for start in range(0, quads, Q):
        ahead = start + Q
        later = tl.load(quad_ptr + ahead * 4, mask=(ahead + q < quads)[None, :, None], other=0)
        sums = _take_quads(
            sums, words, planes_ptr, totals_ptr, scales_ptr, zeros_ptr, start + q, quads, inputs,
            E2M1, GROUP, HAS_ZERO, PARTS, BN, Q,
        )  # fmt: skip
        words = later
    products = tl.sum(sums, 1)
    if HAS_WHOLE:
        products *= tl.load(whole_ptr + weight_row)
    finish(
        products[:, None], out_ptr, bias_ptr, residual_ptr, tile, weight_row, tl.arange(0, 1), 1, outputs,
        ACTIVATION, HAS_BIAS, HAS_RESIDUAL, 1, BN,
    )  # fmt: skip

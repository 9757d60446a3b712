# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""A linear layer with weights of four-bit floats over one token: no tensor core has work there, and
each code is taken out of its word by the instructions that multiply it.

A thread has four neighbouring words (16 bytes), a quad: of each sixteen inputs of a run four
neighbours. What stands around the layer is as in `linear_kernels.vector_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.four_bits.four_bit_kernels import scale_values
from onboard.ops.four_bits.four_bits import RUN as _RUN
from onboard.ops.linear.linear_kernels import finish, weight_rows
from onboard.ops.triton.overlap import wait_for_inputs

RUN = tl.constexpr(_RUN)
QUADS = tl.constexpr(4)
"""Of a run."""
PLANES = tl.constexpr(8)
_ENLARGED, _BACK = tl.constexpr(2.0**66), tl.constexpr(2.0**60)
"""Codes are read as 2^-126 of what they are: inputs are made large before, sums after."""


@triton.jit
def _codes(words, PLANE: tl.constexpr):
    """Return the codes in a plane of words times 2^-126, float32.

    The sign goes to the sign, the other bits to the last of the exponent and the first of the
    mantissa; the second shift copies the sign into bits that are then masked.
    """
    bits = ((words << (28 - 4 * PLANE)) >> 6) & -0x7E400000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _take_quads(
    sums, squares, words, x_ptr, norm_ptr, scale_ptr, quad, inputs,
    HAS_NORM: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Add the products of some quads [BN, Q, 4] to the sums [BN, Q], and their squares [Q, 4] to
    those of the norm.
    """
    PARTS: tl.constexpr = 1 if GROUP >= RUN else RUN // GROUP
    EACH: tl.constexpr = PLANES // PARTS
    first = quad // QUADS * RUN
    column = (first + quad % QUADS * 4)[:, None] + tl.arange(0, 4)[None, :]
    for part in tl.static_range(PARTS):
        products = tl.zeros([BN, Q, 4], tl.float32)
        for plane in tl.static_range(part * EACH, part * EACH + EACH):
            k = column + 16 * plane
            x = tl.load(x_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)
            if HAS_NORM:
                squares += x * x
                x *= tl.load(norm_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)
            products += _codes(words, plane) * (x * _ENLARGED)[None, :, :]
        group = tl.minimum(first + part * GROUP, inputs - 1) // GROUP
        scale = scale_values(tl.load(scale_ptr[:, None] + group[None, :]))
        sums += tl.sum(products, 2) * _BACK * scale
    return sums, squares


@triton.jit
def four_bit_vector_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, residual_ptr, norm_ptr, scale_ptr, whole_ptr,
    outputs, inputs, groups, eps,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    GROUP: tl.constexpr, HAS_WHOLE: tl.constexpr, BN: tl.constexpr, Q: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes BN products, Q quads of each at a time; the words of the next ones are
    asked for before those are multiplied, the first before the input is waited for.
    """
    tile = tl.program_id(0)
    weight_row = weight_rows(tile, outputs, ACTIVATION is not None, BN)
    wide = weight_row.to(tl.int64)
    quads = tl.cdiv(inputs, RUN) * QUADS
    q = tl.arange(0, Q)
    word = q[:, None] * 4 + tl.arange(0, 4)[None, :]
    quad_ptr = w_ptr + (wide * (quads * 4))[:, None, None] + word[None, :, :]
    scales_ptr = scale_ptr + wide * groups
    words = tl.load(quad_ptr, mask=(q < quads)[None, :, None], other=0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros([BN, Q], tl.float32)
    squares = tl.zeros([Q, 4], tl.float32)
    for start in range(0, quads, Q):
        ahead = start + Q
        later = tl.load(quad_ptr + ahead * 4, mask=(ahead + q < quads)[None, :, None], other=0)
        sums, squares = _take_quads(
            sums, squares, words, x_ptr, norm_ptr, scales_ptr, start + q, inputs,
            HAS_NORM, GROUP, BN, Q,
        )  # fmt: skip
        words = later
    products = tl.sum(sums, 1)
    if HAS_WHOLE:
        products *= tl.load(whole_ptr + weight_row)
    if HAS_NORM:
        products *= tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / inputs + eps)
    finish(
        products[:, None], out_ptr, bias_ptr, residual_ptr, tile, weight_row, tl.arange(0, 1), 1, outputs,
        ACTIVATION, HAS_BIAS, HAS_RESIDUAL, 1, BN,
    )  # fmt: skip

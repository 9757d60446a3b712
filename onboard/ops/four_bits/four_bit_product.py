# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Linear layers with four-bit weights: kernels that read each word once, for few tokens, and one
that writes a weight out, for many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.four_bits.four_bit_kernels import (
    BACK,
    level,
    planes,
    scale_factor,
    scale_values,
    scaled_planes,
)
from onboard.ops.four_bits.four_bits import RUN as _RUN
from onboard.ops.four_bits.four_bits import WORDS as _WORDS
from onboard.ops.four_bits.four_bits import ZERO as _ZERO
from onboard.ops.linear.linear_kernels import finish, joined, prefetch, weight_rows
from onboard.ops.triton.overlap import wait_for_inputs

RUN, WORDS, ZERO = tl.constexpr(_RUN), tl.constexpr(_WORDS), tl.constexpr(float(_ZERO))
AHEAD = tl.constexpr(8)
"""Runs of a row that are fetched into the L2 cache before the kernel before has ended."""


@triton.jit
def _group(
    scale_ptr, zero_ptr, inputs, column, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Return the scales [BN] of the group that an input belongs to, float32, its zeros' codes [BN, 1]
    and what is added to its values, [BN].
    """
    group = tl.minimum(column, inputs - 1) // GROUP
    scale = scale_values(tl.load(scale_ptr + group))
    if not HAS_ZERO:
        return scale, tl.full([BN, 1], ZERO, tl.float32), scale
    else:
        zero = tl.load(zero_ptr + group).to(tl.float32)
        if zero_ptr.dtype.element_ty == tl.uint8:
            return scale, zero[:, None], scale
        else:
            return scale, tl.zeros([BN, 1], tl.float32), zero


@triton.jit
def _inputs(x_ptr, column, inside, inputs, EVEN: tl.constexpr, TYPE: tl.constexpr):
    """Return 16 inputs of each token, [16, tokens]."""
    k = column + tl.arange(0, 16)
    if EVEN:
        x = tl.load(x_ptr[:, None] + k[None, :], mask=inside[:, None], other=0.0)
    else:
        x = tl.load(
            x_ptr[:, None] + k[None, :], mask=inside[:, None] & (k < inputs)[None, :], other=0.0
        )
    return tl.trans(x.to(TYPE))


@triton.jit
def products(
    rows_ptr, x_ptr, scale_ptr, zero_ptr, inside, low, high, inputs,
    E2M1: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the products [BN, BM] of rows of the weight and of x over the runs low .. high."""
    IN_WEIGHT: tl.constexpr = E2M1 and tl.float16 != TYPE
    KIND: tl.constexpr = scale_ptr.dtype.element_ty
    if IN_WEIGHT and (tl.uint8 == KIND or tl.float8e4nv == KIND):
        return _scaled_products(
            rows_ptr, x_ptr, scale_ptr, inside, low, high, inputs,
            GROUP, EVEN, BM, BN, STAGES, TYPE, PTX,
        )  # fmt: skip
    else:
        return _products_by_group(
            rows_ptr, x_ptr, scale_ptr, zero_ptr, inside, low, high, inputs,
            E2M1, GROUP, HAS_ZERO, EVEN, BM, BN, STAGES, TYPE, PTX,
        )  # fmt: skip


@triton.jit
def _factor(
    scale_ptr, inputs, column, GROUP: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Return the scales [BN, 1] of the group that an input belongs to."""
    scale = tl.load(scale_ptr + tl.minimum(column, inputs - 1) // GROUP)
    return scale_factor(scale, TYPE, PTX)[:, None]


@triton.jit
def _scaled_products(
    rows_ptr, x_ptr, scale_ptr, inside, low, high, inputs,
    GROUP: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the products where codes times scales are exact in TYPE: one sum over all groups, which
    the tensor cores keep.
    """
    IS_EXPONENT: tl.constexpr = scale_ptr.dtype.element_ty == tl.uint8
    sums = tl.zeros([BN, BM], tl.float32)
    for run in tl.range(low, high, num_stages=STAGES):
        words = tl.load(rows_ptr[:, None] + run * WORDS + tl.arange(0, WORDS)[None, :])
        for byte in tl.static_range(4):
            column = run * RUN + byte * 32
            low_scale = _factor(scale_ptr, inputs, column, GROUP, TYPE, PTX)
            if GROUP == 16:
                high_scale = _factor(scale_ptr, inputs, column + 16, GROUP, TYPE, PTX)
            else:
                high_scale = low_scale
            first, second = scaled_planes(
                words, low_scale, high_scale, byte, IS_EXPONENT, TYPE, PTX
            )
            x = _inputs(x_ptr, column, inside, inputs, EVEN, TYPE)
            y = _inputs(x_ptr, column + 16, inside, inputs, EVEN, TYPE)
            sums = tl.dot(first, x, sums, input_precision="ieee")
            sums = tl.dot(second, y, sums, input_precision="ieee")
    if PTX and tl.bfloat16 == TYPE and not IS_EXPONENT:
        sums *= BACK
    return sums


@triton.jit
def _products_by_group(
    rows_ptr, x_ptr, scale_ptr, zero_ptr, inside, low, high, inputs,
    E2M1: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the products, those of a group's codes scaled before they are added; where zeros are of
    a float type they are added to each value, which is a group's inputs' sum times them.
    """
    ADDED: tl.constexpr = HAS_ZERO and zero_ptr.dtype.element_ty != tl.uint8
    sums = tl.zeros([BN, BM], tl.float32)
    for run in tl.range(low, high, num_stages=STAGES):
        words = tl.load(rows_ptr[:, None] + run * WORDS + tl.arange(0, WORDS)[None, :])
        step = tl.zeros([BN, BM], tl.float32)
        total = tl.zeros([BM], tl.float32)
        scale, zero, added = _group(scale_ptr, zero_ptr, inputs, run * RUN, GROUP, HAS_ZERO, BN)
        for byte in tl.static_range(4):
            column = run * RUN + byte * 32
            if byte > 0 and (byte * 32) % GROUP == 0:
                scale, zero, added = _group(
                    scale_ptr, zero_ptr, inputs, column, GROUP, HAS_ZERO, BN
                )
            first, second = planes(words, zero, byte, E2M1, TYPE, PTX)
            x = _inputs(x_ptr, column, inside, inputs, EVEN, TYPE)
            y = _inputs(x_ptr, column + 16, inside, inputs, EVEN, TYPE)
            step = tl.dot(first, x, step, input_precision="ieee")
            if ADDED:
                total += tl.sum(x.to(tl.float32), 0)
            if GROUP == 16:
                sums += step * scale[:, None]
                if ADDED:
                    sums += added[:, None] * total[None, :]
                    total = tl.zeros([BM], tl.float32)
                scale, zero, added = _group(
                    scale_ptr, zero_ptr, inputs, column + 16, GROUP, HAS_ZERO, BN
                )
                step = tl.zeros([BN, BM], tl.float32)
            step = tl.dot(second, y, step, input_precision="ieee")
            if ADDED:
                total += tl.sum(y.to(tl.float32), 0)
            if byte == 3 or (byte * 32 + 32) % GROUP == 0:
                sums += step * scale[:, None]
                if ADDED:
                    sums += added[:, None] * total[None, :]
                    total = tl.zeros([BM], tl.float32)
                step = tl.zeros([BN, BM], tl.float32)
    return sums


@triton.jit
def four_bit_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, residual_ptr, scale_ptr, zero_ptr, whole_ptr, parts_ptr, arrived_ptr,
    rows, outputs, inputs, groups, blocks,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    E2M1: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_WHOLE: tl.constexpr, EVEN: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    TYPE: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One of `blocks` blocks of BM tokens: a program computes BN products of each, or their sums
    over one of SPLITS parts of the inputs.

    Products of codes are summed up by the tensor cores, a group at a time, then scaled.
    """
    tile, split = tl.program_id(0) // blocks, tl.program_id(1)
    weight_row = weight_rows(tile, outputs, ACTIVATION is not None, BN)
    runs = tl.cdiv(inputs, RUN)
    share = tl.cdiv(runs, SPLITS)
    low, high = split * share, tl.minimum(split * share + share, runs)
    wide = weight_row.to(tl.int64)
    rows_ptr = w_ptr + wide * (runs * WORDS)
    if OVERLAP:
        ahead = tl.minimum(high - low, AHEAD) * (WORDS * 4)
        prefetch(rows_ptr + low * WORDS, tl.zeros([BN], tl.int32) + ahead)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    sums = products(
        rows_ptr, x_ptr + row.to(tl.int64) * inputs, scale_ptr + wide * groups,
        zero_ptr + wide * groups if HAS_ZERO else scale_ptr, row < rows,
        low, high, inputs,
        E2M1, GROUP, HAS_ZERO, EVEN, BM, BN, STAGES, TYPE, PTX,
    )  # fmt: skip
    if SPLITS > 1:
        last, sums = joined(sums, parts_ptr, arrived_ptr, tl.program_id(0), split, SPLITS, BM, BN)
        if not last:
            return
    if HAS_WHOLE:
        sums *= tl.load(whole_ptr + weight_row)[:, None]
    finish(
        sums, out_ptr, bias_ptr, residual_ptr, tile, weight_row, row, rows, outputs,
        ACTIVATION, HAS_BIAS, HAS_RESIDUAL, BM, BN,
    )  # fmt: skip


@triton.jit
def write_out_kernel(
    out_ptr, w_ptr, scale_ptr, zero_ptr, whole_ptr, outputs, inputs, groups,
    E2M1: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_WHOLE: tl.constexpr,
    BN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write out BN outputs' values in one run."""
    wait_for_inputs(OVERLAP)
    run = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < outputs
    row = tl.minimum(row, outputs - 1).to(tl.int64)
    runs = tl.num_programs(1)
    i = tl.arange(0, WORDS)
    words = tl.load(w_ptr + (row * runs + run)[:, None] * WORDS + i[None, :])
    scales_ptr = scale_ptr + row * groups
    zeros_ptr = zero_ptr + row * groups if HAS_ZERO else scales_ptr
    for plane in tl.static_range(8):
        column = run * RUN + plane * WORDS
        scale, zero, added = _group(scales_ptr, zeros_ptr, inputs, column, GROUP, HAS_ZERO, BN)
        if HAS_WHOLE:
            scale *= tl.load(whole_ptr + row)
        values = level(words >> (4 * plane), zero, E2M1) * scale[:, None]
        if HAS_ZERO and zero_ptr.dtype.element_ty != tl.uint8:
            values += added[:, None]
        place = row[:, None] * inputs + (column + i)[None, :]
        tl.store(
            out_ptr + place, values.to(out_ptr.dtype.element_ty),
            mask=inside[:, None] & (column + i < inputs)[None, :],
        )  # fmt: skip

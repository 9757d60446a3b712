# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Linear layers with integers of eight bits whose groups share scales: kernels that read each code
once, for few tokens; one that writes a weight out, for many; one that scales sums of integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.linear.linear_kernels import finish, joined, prefetch, weight_rows
from onboard.ops.linear.triton_silu_mul import activate
from onboard.ops.triton.overlap import wait_for_inputs

AHEAD = tl.constexpr(1024)
"""Bytes of a row that are fetched into the L2 cache before the kernel before has ended."""


@triton.jit
def int8_vector_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, residual_ptr, scale_ptr, offset_ptr, outputs, inputs, groups,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_OFFSET: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token: a program computes BN products. PART inputs, of one group, are summed up before they
    are scaled.
    """
    tile = tl.program_id(0)
    weight_row = weight_rows(tile, outputs, ACTIVATION is not None, BN)
    PARTS: tl.constexpr = BK // PART
    k, part = tl.arange(0, BK), tl.arange(0, PARTS) * PART
    wide = weight_row.to(tl.int64)
    rows_ptr, group_row = w_ptr + wide * inputs, wide * groups
    sums = tl.zeros([BN, PARTS], tl.float32)
    if OVERLAP:
        prefetch(rows_ptr, tl.zeros([BN], tl.int32) + tl.minimum(inputs // 16 * 16, AHEAD))
    wait_for_inputs(OVERLAP)
    for start in range(0, inputs, BK):
        inside = start + k < inputs
        w = tl.load(rows_ptr[:, None] + (start + k)[None, :], mask=inside[None, :], other=0)
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        products = tl.reshape(w.to(tl.float32) * x[None, :], [BN, PARTS, PART])
        group = group_row[:, None] + ((start + part) // GROUP)[None, :]
        there = (start + part < inputs)[None, :]
        scale = tl.load(scale_ptr + group, mask=there, other=0.0).to(tl.float32)
        sums += tl.sum(products, 2) * scale
        if HAS_OFFSET:
            offset = tl.load(offset_ptr + group, mask=there, other=0.0).to(tl.float32)
            sums += tl.sum(tl.reshape(x, [PARTS, PART]), 1)[None, :] * offset
    finish(
        tl.sum(sums, 1)[:, None], out_ptr, bias_ptr, residual_ptr, tile, weight_row, tl.arange(0, 1), 1, outputs,
        ACTIVATION, HAS_BIAS, HAS_RESIDUAL, 1, BN,
    )  # fmt: skip


@triton.jit
def products(
    rows_ptr, x_ptr, scale_ptr, offset_ptr, inside, low, high, inputs,
    HAS_OFFSET: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Return the products [BN, BM] of rows of the weight and of x over the inputs low .. high, BK of
    one group at a time.
    """
    k = tl.arange(0, BK)
    sums = tl.zeros([BN, BM], tl.float32)
    for start in tl.range(low, high, BK, num_stages=STAGES):
        column = start + k
        if EVEN:
            w = tl.load(rows_ptr[:, None] + column[None, :])
            x = tl.load(x_ptr[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        else:
            there = (column < inputs)[None, :]
            w = tl.load(rows_ptr[:, None] + column[None, :], mask=there, other=0)
            x = tl.load(x_ptr[:, None] + column[None, :], mask=inside[:, None] & there, other=0.0)
        step = tl.dot(w.to(TYPE), tl.trans(x.to(TYPE)), input_precision="ieee")
        sums += step * tl.load(scale_ptr + start // GROUP).to(tl.float32)[:, None]
        if HAS_OFFSET:
            offset = tl.load(offset_ptr + start // GROUP).to(tl.float32)
            sums += offset[:, None] * tl.sum(x.to(tl.float32), 1)[None, :]
    return sums


@triton.jit
def int8_matrix_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, residual_ptr, scale_ptr, offset_ptr, parts_ptr, arrived_ptr,
    rows, outputs, inputs, groups, blocks,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_OFFSET: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, TYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One of `blocks` blocks of BM tokens: a program computes BN products of each, or their sums over
    one of SPLITS parts of the inputs. Codes are exact in TYPE; their products are scaled by groups.
    """
    tile, split = tl.program_id(0) // blocks, tl.program_id(1)
    weight_row = weight_rows(tile, outputs, ACTIVATION is not None, BN)
    share = tl.cdiv(tl.cdiv(inputs, BK), SPLITS) * BK
    low = split * share
    high = tl.minimum(low + share, inputs)
    wide = weight_row.to(tl.int64)
    rows_ptr = w_ptr + wide * inputs
    if OVERLAP:
        ahead = tl.maximum(tl.minimum((high - low) // 16 * 16, AHEAD), 0)
        prefetch(rows_ptr + low, tl.zeros([BN], tl.int32) + ahead)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    sums = products(
        rows_ptr, x_ptr + row.to(tl.int64) * inputs, scale_ptr + wide * groups,
        offset_ptr + wide * groups if HAS_OFFSET else scale_ptr, row < rows, low, high, inputs,
        HAS_OFFSET, GROUP, EVEN, BM, BN, BK, STAGES, TYPE,
    )  # fmt: skip
    if SPLITS > 1:
        last, sums = joined(sums, parts_ptr, arrived_ptr, tl.program_id(0), split, SPLITS, BM, BN)
        if not last:
            return
    finish(
        sums, out_ptr, bias_ptr, residual_ptr, tile, weight_row, row, rows, outputs,
        ACTIVATION, HAS_BIAS, HAS_RESIDUAL, BM, BN,
    )  # fmt: skip


@triton.jit
def int8_write_out_kernel(
    out_ptr, w_ptr, scale_ptr, offset_ptr, outputs, inputs, groups,
    HAS_OFFSET: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write out the values of BN outputs and BK inputs, of one group."""
    wait_for_inputs(OVERLAP)
    start = tl.program_id(1) * BK
    row = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    k = start + tl.arange(0, BK)
    inside, group = row < outputs, row * groups + start // GROUP
    place = row[:, None] * inputs + k[None, :]
    there = inside[:, None] & (k < inputs)[None, :]
    values = tl.load(w_ptr + place, mask=there, other=0).to(tl.float32)
    values *= tl.load(scale_ptr + group, mask=inside, other=0.0).to(tl.float32)[:, None]
    if HAS_OFFSET:
        values += tl.load(offset_ptr + group, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def scale_sums_kernel(
    out_ptr, sums_ptr, x_scale_ptr, scale_ptr, bias_ptr, residual_ptr, outputs,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Make BLOCK outputs of one token of sums of integers [tokens, outputs]; with ACTIVATION these
    are gates, then what they multiply.
    """
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < outputs
    sums_ptr += row * (2 * outputs if ACTIVATION is not None else outputs)
    x_scale = tl.load(x_scale_ptr + row)
    y = _scaled(sums_ptr, x_scale, scale_ptr, bias_ptr, n, inside, HAS_BIAS)
    if ACTIVATION is not None:
        up = _scaled(sums_ptr, x_scale, scale_ptr, bias_ptr, outputs + n, inside, HAS_BIAS)
        y = activate(y, ACTIVATION) * up
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + row * outputs + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + n, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(sums_ptr, x_scale, scale_ptr, bias_ptr, n, inside, HAS_BIAS: tl.constexpr):
    sums = tl.load(sums_ptr + n, mask=inside, other=0).to(tl.float32)
    y = sums * x_scale * tl.load(scale_ptr + n, mask=inside, other=0.0).to(tl.float32)
    return y + tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else y

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Linear layers over few tokens: kernels that read their weights at the memory's speed.

With few tokens a product is bound by its weights, each read once. What a decoder does after it goes
into the same
kernel: bias, gated activation and residual addition. So does, for one token, an RMSNorm before it:
its factor is applied to the products, so that the first of them need not wait for the whole row.

Kernels of one stream overlap (programmatic dependent launch): a program asks for weights before it
waits for the kernel that makes its input.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.linear.triton_silu_mul import activate
from onboard.ops.triton.overlap import wait_for_inputs

BLOCK = tl.constexpr(128)
"""Rows and columns of a quantised weight that share a scale, where it has scales of blocks."""


@triton.jit
def prefetch(pointers, size):
    """Bring `size` bytes (a multiple of 16) from each pointer into the L2 cache, without waiting
    for them.
    """
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}", "=r,l,r",
        [pointers, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def weight_rows(tile, outputs, GATED: tl.constexpr, BN: tl.constexpr):
    """Return the BN rows of the weight that a program reads; with GATED gates, then as many of what
    they multiply.
    """
    i = tl.arange(0, BN)
    if GATED:
        HALF: tl.constexpr = BN // 2
        return tl.minimum(tile * HALF + i % HALF, outputs - 1) + i // HALF * outputs
    else:
        return tl.minimum(tile * BN + i, outputs - 1)


@triton.jit
def finish(
    sums, out_ptr, bias_ptr, residual_ptr, tile, weight_row, row, rows, outputs,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the bias to the products [BN, BM], activate, add the residual, store."""
    if HAS_BIAS:
        sums += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        HALF: tl.constexpr = BN // 2
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, HALF, BM]), [1, 2, 0]))
        sums = activate(gate, ACTIVATION) * up
        n = tile * HALF + tl.arange(0, HALF)
    else:
        n = tile * BN + tl.arange(0, BN)
    place = row[None, :].to(tl.int64) * outputs + n[:, None]
    inside = (row < rows)[None, :] & (n < outputs)[:, None]
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _take_columns(
    sums, squares, w, x_ptr, norm_ptr, scale_ptr, up_scale_ptr, k, columns,
    GATED: tl.constexpr, HAS_NORM: tl.constexpr, SCALES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the products of some columns to the sums, and their squares to those of the norm.

    With SCALES 2 each block of columns has a scale, which all rows of a tile share; with GATED
    those that are multiplied by the gates have another.
    """
    x = tl.load(x_ptr + k, mask=k < columns, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares += x * x
        x *= tl.load(norm_ptr + k, mask=k < columns, other=0.0).to(tl.float32)
    w = w.to(tl.float32)
    if SCALES == 2:
        scaled = x * tl.load(scale_ptr + k // BLOCK, mask=k < columns, other=0.0)
        if GATED:
            up = x * tl.load(up_scale_ptr + k // BLOCK, mask=k < columns, other=0.0)
            is_gate = (tl.arange(0, BN) < BN // 2)[:, None]
            return sums + w * tl.where(is_gate, scaled[None, :], up[None, :]), squares
        return sums + w * scaled[None, :], squares
    return sums + w * x[None, :], squares


@triton.jit
def _scale_rows(scale_ptr, weight_row, columns, SCALES: tl.constexpr):
    """Return where the scales of a weight's rows begin: 1 each, or 2 those of blocks."""
    if SCALES == 2:
        return scale_ptr + (weight_row // BLOCK) * tl.cdiv(columns, BLOCK)
    else:
        return scale_ptr + weight_row


@triton.jit
def vector_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, residual_ptr, norm_ptr, scale_ptr, outputs, columns, eps,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    SCALES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token: a program computes BN products, of the first BK columns of whose weights it waits
    for nothing.

    SCALES says how the weight is quantised: 0 it is not, 1 with scales of rows, 2 of blocks.
    """
    tile = tl.program_id(0)
    weight_row = weight_rows(tile, outputs, ACTIVATION is not None, BN)
    k = tl.arange(0, BK)
    rows_ptr = w_ptr + weight_row.to(tl.int64) * columns
    tile_ptr = rows_ptr[:, None] + k[None, :]
    GATED: tl.constexpr = ACTIVATION is not None
    first = tile * (BN // 2) if GATED else tile * BN
    blocks_ptr = scale_ptr
    up_blocks_ptr = scale_ptr
    if SCALES == 2:
        blocks_ptr = _scale_rows(scale_ptr, first, columns, SCALES)
        up_blocks_ptr = _scale_rows(scale_ptr, first + outputs, columns, SCALES)
    w = tl.load(tile_ptr, mask=(k < columns)[None, :], other=0.0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    sums, squares = _take_columns(
        sums, squares, w, x_ptr, norm_ptr, blocks_ptr, up_blocks_ptr, k, columns, GATED, HAS_NORM, SCALES, BN
    )  # fmt: skip
    for start in range(BK, columns, BK):
        w = tl.load(tile_ptr + start, mask=(start + k < columns)[None, :], other=0.0)
        sums, squares = _take_columns(
            sums, squares, w, x_ptr, norm_ptr, blocks_ptr, up_blocks_ptr, start + k, columns,
            GATED, HAS_NORM, SCALES, BN,
        )  # fmt: skip
    products = tl.sum(sums, 1)
    if SCALES == 1:
        products *= tl.load(scale_ptr + weight_row)
    if HAS_NORM:
        products *= tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    finish(
        products[:, None], out_ptr, bias_ptr, residual_ptr, tile, weight_row, tl.arange(0, 1), 1, outputs,
        ACTIVATION, HAS_BIAS, HAS_RESIDUAL, 1, BN,
    )  # fmt: skip


@triton.jit
def joined(sums, parts_ptr, arrived_ptr, tile, split, splits, BM: tl.constexpr, BN: tl.constexpr):
    """Leave the sums of this split; return whether it is the last of its tile, and then the sum of
    all.

    Whoever comes last adds them in order, so that the result is the same in every run.
    """
    place = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    parts_ptr += tile * splits * (BN * BM)
    tl.store(parts_ptr + split * (BN * BM) + place, sums)
    tl.debug_barrier()  # all of the program's stores come before its arrival
    last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        sums = tl.zeros([BN, BM], tl.float32)
        for other in range(splits):
            sums += tl.load(parts_ptr + other * (BN * BM) + place, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)
    return last, sums


@triton.jit
def _products(
    rows_ptr, x_ptr, scales, x_scales, inside, low, high, SCALES: tl.constexpr, X_SCALES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):  # fmt: skip
    """Return the products [BN, BM] of rows of the weight and of x over the columns low..high, float32.

    With SCALES or X_SCALES 2 a step is a block's columns, and its products have scales of their own,
    which are asked for one step early. Integers are summed up as integers.
    """
    k = tl.arange(0, BK)
    if SCALES == 2:
        next_scale = tl.load(scales + tl.minimum(low, high - 1) // BLOCK)
    if X_SCALES == 2:
        next_x_scale = tl.load(
            x_scales + tl.minimum(low, high - 1) // BLOCK, mask=inside, other=0.0
        )
    SUMS: tl.constexpr = tl.int32 if tl.int8 == DOT_TYPE else tl.float32
    sums = tl.zeros([BN, BM], SUMS)
    for start in tl.range(low, high, BK, num_stages=STAGES):
        column = start + k
        if EVEN:
            w = tl.load(rows_ptr[:, None] + column[None, :])
            x = tl.load(x_ptr + column[None, :], mask=inside[:, None], other=0.0)
        else:
            w = tl.load(
                rows_ptr[:, None] + column[None, :], mask=(column < high)[None, :], other=0.0
            )
            x = tl.load(
                x_ptr + column[None, :], mask=inside[:, None] & (column < high)[None, :], other=0.0
            )
        if SCALES == 2 or X_SCALES == 2:
            step = tl.dot(w.to(DOT_TYPE), tl.trans(x.to(DOT_TYPE)), input_precision="ieee")
            block = tl.minimum(start + BK, high - 1) // BLOCK
            if SCALES == 2:
                step *= next_scale[:, None]
                next_scale = tl.load(scales + block)
            if X_SCALES == 2:
                step *= next_x_scale[None, :]
                next_x_scale = tl.load(x_scales + block, mask=inside, other=0.0)
            sums += step
        else:
            sums = tl.dot(
                w.to(DOT_TYPE),
                tl.trans(x.to(DOT_TYPE)),
                sums,
                input_precision="ieee",
                out_dtype=SUMS,
            )
    return sums.to(tl.float32)


@triton.jit
def matrix_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, residual_ptr, scale_ptr, x_scale_ptr, parts_ptr, arrived_ptr,
    rows, outputs, columns, blocks,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SCALES: tl.constexpr, X_SCALES: tl.constexpr,
    SPLITS: tl.constexpr, SHARES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, DOT_TYPE: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One of `blocks` blocks of BM tokens: a program computes BN products of each.

    The columns are summed up in shares: SPLITS programs take one each, or one program takes SHARES,
    one after the other; as many shares of either kind give the same sums. The weight is the wide
    side of the matrix products, so that tokens need not be padded to a full tile.

    SCALES says how the weight is quantised: 0 it is not, 1 with scales of rows, 2 of blocks;
    X_SCALES how x is: 0 it is not, 1 with scales of tokens, 2 of each token's blocks.
    """
    tile, split = tl.program_id(0) // blocks, tl.program_id(1)
    weight_row = weight_rows(tile, outputs, ACTIVATION is not None, BN)
    share = tl.cdiv(tl.cdiv(columns, BK), SPLITS * SHARES) * BK
    low = split * share
    high = tl.minimum(low + share, columns)
    rows_ptr = w_ptr + weight_row.to(tl.int64) * columns
    scales = _scale_rows(scale_ptr, weight_row, columns, SCALES) if SCALES else rows_ptr
    if OVERLAP and AHEAD:
        size = tl.minimum(AHEAD, high - low) * rows_ptr.dtype.element_ty.primitive_bitwidth // 8
        prefetch(rows_ptr + low, tl.where(weight_row >= 0, size, 0))
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    x_ptr += row[:, None].to(tl.int64) * columns
    x_scales = x_scale_ptr + row * tl.cdiv(columns, BLOCK) if X_SCALES == 2 else row
    sums = _products(
        rows_ptr, x_ptr, scales, x_scales, row < rows, low, high, SCALES, X_SCALES, BM, BN, BK, STAGES, EVEN, DOT_TYPE
    )  # fmt: skip
    if SHARES > 1:
        for part in range(1, SHARES):
            high = tl.minimum(part * share + share, columns)
            sums += _products(
                rows_ptr, x_ptr, scales, x_scales, row < rows, part * share, high,
                SCALES, X_SCALES, BM, BN, BK, STAGES, EVEN, DOT_TYPE,
            )  # fmt: skip
    if SPLITS > 1:
        last, sums = joined(sums, parts_ptr, arrived_ptr, tile, split, SPLITS, BM, BN)
        if not last:
            return
    if SCALES == 1:
        sums *= tl.load(scales)[:, None]
    if X_SCALES == 1:
        sums *= tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[None, :]
    finish(
        sums, out_ptr, bias_ptr, residual_ptr, tile, weight_row, row, rows, outputs,
        ACTIVATION, HAS_BIAS, HAS_RESIDUAL, BM, BN,
    )  # fmt: skip

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Kernels of a mixture of experts: pairs of a token and a chosen expert, sorted by expert
(`sort_kernels.py`), are multiplied in blocks of BLOCK_M.

A program of a product takes one block and a slice of its expert's weights, so that with few tokens
every weight of a chosen expert is read once. Nothing depends on values on the host: grids have room
for the most blocks that there can be, and programs without one end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.four_bits.four_bit_product import RUN, WORDS
from onboard.ops.four_bits.four_bit_product import products as four_bit_products
from onboard.ops.integers.int8_product import products as int8_products
from onboard.ops.linear.fp8_kernels import nearest
from onboard.ops.linear.fp8_linear import BLOCK as _BLOCK
from onboard.ops.linear.fp8_linear import LARGEST as _LARGEST
from onboard.ops.linear.triton_silu_mul import activate
from onboard.ops.triton.overlap import wait_for_inputs

BLOCK, LARGEST = tl.constexpr(_BLOCK), tl.constexpr(_LARGEST)


@triton.jit
def _block(
    blocks_ptr, order_ptr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return a block's expert, the places of its rows, their pairs, and which rows there are.

    With PAIRS nothing was sorted: each block is one pair, whose expert `blocks_ptr` has.
    """
    row = tl.arange(0, BLOCK_M)
    if PAIRS:
        expert = tl.load(blocks_ptr + tl.program_id(1)).to(tl.int64)
        place = tl.program_id(1) + row
        return expert, place, place, (row == 0) & (expert >= 0) & (expert < EXPERTS)
    else:
        blocks_ptr += tl.program_id(1) * 3
        place = tl.load(blocks_ptr + 1) + row
        real = place < tl.load(blocks_ptr + 2)
        return (
            tl.load(blocks_ptr).to(tl.int64),
            place,
            tl.load(order_ptr + place, mask=real, other=0),
            real,
        )


@triton.jit
def _product(
    a_ptr, a_row, real, a_stride, w_ptr, w_row, w_real, a_scale_ptr, scale_ptr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT_TYPE: tl.constexpr,
    A_SCALES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Return rows of a times rows of w, both with K contiguous: [BLOCK_M, BLOCK_N] float32.

    SCALES says how w is quantised, and where `scale_ptr` [BLOCK_N] points: 0 it is not, 1 to a
    row's scale, 2 to those of its blocks of BLOCK columns. A_SCALES says the same of a, or 3: it is
    to be quantised with the scale at `a_scale_ptr`. Scales of blocks are asked for one step early.
    Integers are summed up as integers.
    """
    k = tl.arange(0, BLOCK_K)
    a_ptr += a_row[:, None] * a_stride + k[None, :]
    w_ptr += w_row[None, :] * K + k[:, None]
    SUMS: tl.constexpr = tl.int32 if tl.int8 == DOT_TYPE else tl.float32
    total = tl.zeros([BLOCK_M, BLOCK_N], SUMS)
    given = tl.load(a_scale_ptr) if A_SCALES == 3 else 1.0
    if SCALES == 2:
        next_scale = tl.load(scale_ptr, mask=w_real, other=0.0)
    if A_SCALES == 2:
        next_a_scale = tl.load(a_scale_ptr, mask=real, other=0.0)
    for first in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_ptr + first, mask=real[:, None], other=0.0)
            w = tl.load(w_ptr + first, mask=w_real[None, :], other=0.0)
        else:
            a = tl.load(a_ptr + first, mask=real[:, None] & (first + k < K)[None, :], other=0.0)
            w = tl.load(w_ptr + first, mask=w_real[None, :] & (first + k < K)[:, None], other=0.0)
        if A_SCALES == 3:
            if tl.int8 == DOT_TYPE:
                a = tl.clamp(nearest(tl.div_rn(a.to(tl.float32), given)), -128.0, 127.0)
            else:
                a = tl.clamp(a.to(tl.float32) / given, -LARGEST, LARGEST).to(tl.float8e4nv)
        if SCALES == 2 or A_SCALES == 2:
            step = tl.dot(a.to(DOT_TYPE), w.to(DOT_TYPE), input_precision="ieee")
            block = tl.minimum(first + BLOCK_K, K - 1) // BLOCK
            if SCALES == 2:
                step *= next_scale[None, :]
                next_scale = tl.load(scale_ptr + block, mask=w_real, other=0.0)
            if A_SCALES == 2:
                step *= next_a_scale[:, None]
                next_a_scale = tl.load(a_scale_ptr + block, mask=real, other=0.0)
            total += step
        else:
            total = tl.dot(
                a.to(DOT_TYPE), w.to(DOT_TYPE), total, input_precision="ieee", out_dtype=SUMS
            )
    sums = total.to(tl.float32)
    if SCALES == 1:
        sums *= tl.load(scale_ptr, mask=w_real, other=0.0)[None, :]
    if A_SCALES == 1:
        sums *= tl.load(a_scale_ptr, mask=real, other=0.0)[:, None]
    if A_SCALES == 3:
        sums *= given
    return sums


@triton.jit
def _scales_of(
    scale_ptr, expert, row, ROWS: tl.constexpr, PART: tl.constexpr, K: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """Return where the scales of an expert's rows are, of ROWS; each PART of them has blocks of its
    own.
    """
    if SCALES == 1:
        return scale_ptr + expert * ROWS + row
    elif SCALES == 2:
        EACH: tl.constexpr = (PART + BLOCK - 1) // BLOCK
        ALL: tl.constexpr = ROWS // PART * EACH
        block = row // PART * EACH + row % PART // BLOCK
        return scale_ptr + (expert * ALL + block) * ((K + BLOCK - 1) // BLOCK)
    else:
        return row


@triton.jit
def _input_scales(scale_ptr, expert, row, K: tl.constexpr, A_SCALES: tl.constexpr):
    """Return where the scales of rows of inputs are."""
    if A_SCALES == 1:
        return scale_ptr + row
    elif A_SCALES == 2:
        return scale_ptr + row * ((K + BLOCK - 1) // BLOCK)
    elif A_SCALES == 3:
        return scale_ptr + expert
    else:
        return row


@triton.jit
def _rows_product(
    x_ptr, x_row, real, x_stride, w_ptr, expert, row, inside, x_scale_ptr, scale_ptr, zero_ptr, whole_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, X_SCALES: tl.constexpr, SCALES: tl.constexpr,
    LEVELS: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_WHOLE: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, DOT_TYPE: tl.constexpr,
):  # fmt: skip
    """Return rows of x times rows of an expert, of ROWS, [BLOCK_M, WIDTH] float32: of its numbers
    or, with LEVELS, of what its codes stand for, in words of four bits or integers of eight.
    """
    if LEVELS is None:
        return _product(
            x_ptr, x_row, real, x_stride, w_ptr + expert * (ROWS * K), row, inside,
            _input_scales(x_scale_ptr, expert, x_row, K, X_SCALES),
            _scales_of(scale_ptr, expert, row, ROWS, PART, K, SCALES),
            K, BLOCK_M, WIDTH, BLOCK_K, DOT_TYPE, X_SCALES, SCALES,
        )  # fmt: skip
    elif LEVELS == "int8":
        PARTS: tl.constexpr = (K + GROUP - 1) // GROUP
        wide = expert * ROWS + tl.minimum(row, ROWS - 1)
        return tl.trans(
            int8_products(
                w_ptr + wide * K, x_ptr + x_row * x_stride, scale_ptr + wide * PARTS,
                zero_ptr + wide * PARTS if HAS_ZERO else scale_ptr, real, 0, K, K,
                HAS_ZERO, GROUP, K % BLOCK_K == 0, BLOCK_M, WIDTH, BLOCK_K, STAGES, DOT_TYPE,
            )
        )  # fmt: skip
    else:
        RUNS: tl.constexpr = (K + RUN - 1) // RUN
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        wide = expert * ROWS + tl.minimum(row, ROWS - 1)
        total = four_bit_products(
            w_ptr + wide * (RUNS * WORDS), x_ptr + x_row * x_stride, scale_ptr + wide * GROUPS,
            zero_ptr + wide * GROUPS if HAS_ZERO else scale_ptr, real, 0, RUNS, K,
            LEVELS == "e2m1", GROUP, HAS_ZERO, RUNS * RUN == K, BLOCK_M, WIDTH, STAGES, DOT_TYPE, PTX,
        )  # fmt: skip
        if HAS_WHOLE:
            total *= tl.load(whole_ptr + wide)[:, None]
        return tl.trans(total)


@triton.jit
def gate(
    gate_, up, limit, alpha, up_offset,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_ALPHA: tl.constexpr,
):  # fmt: skip
    """Return the gated activation, as `torch_moe` defines it."""
    if HAS_LIMIT:
        gate_ = tl.minimum(gate_, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if HAS_ALPHA:
        gate_ = gate_ * tl.sigmoid(alpha * gate_)
    else:
        gate_ = activate(gate_, ACTIVATION)
    return gate_ * (up + up_offset)


@triton.jit
def up_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, x_scale_ptr, scale_ptr, zero_ptr, whole_ptr, order_ptr, blocks_ptr,
    limit, alpha, up_offset, x_stride,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    GATED: tl.constexpr, ORDER: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_ALPHA: tl.constexpr, DOT_TYPE: tl.constexpr,
    X_SCALES: tl.constexpr, SCALES: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_WHOLE: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """First products of one block's tokens and BLOCK_N channels, activated: rows of out are in the
    sorted order.

    Rows of up and gate are read alternately, so that one product has both for a channel side by
    side; ORDER says where they are, see `quantised_moe.ROW_ORDERS`.
    """
    wait_for_inputs(OVERLAP)
    expert, place, pair, real = _block(blocks_ptr, order_ptr, PAIRS, EXPERTS, BLOCK_M)
    if tl.max(real.to(tl.int32), 0) == 0:
        return
    token = (pair // TOP).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    ROWS: tl.constexpr = 2 * N if GATED else N
    PART: tl.constexpr = ROWS if ORDER == "interleaved" else N
    if GATED:
        both = tl.arange(0, WIDTH)
        row = tl.program_id(0) * BLOCK_N + both // 2
        inside = row < N
        # Of each two the first is up's
        if ORDER == "up_gate":
            row += both % 2 * N
        elif ORDER == "gate_up":
            row += (1 - both % 2) * N
        else:
            row += row + 1 - both % 2
    else:
        row = channel
        inside = channel < N
    total = _rows_product(
        x_ptr, token, real, x_stride, w_ptr, expert, row, inside, x_scale_ptr, scale_ptr, zero_ptr, whole_ptr,
        K, ROWS, PART, X_SCALES, SCALES, LEVELS, GROUP, HAS_ZERO, HAS_WHOLE, STAGES, PTX,
        BLOCK_M, WIDTH, BLOCK_K, DOT_TYPE,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * ROWS + row, mask=inside, other=0.0)
        total += bias.to(tl.float32)[None, :]
    if GATED:
        up, gated = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N, 2]))
        out = gate(gated, up, limit, alpha, up_offset, ACTIVATION, HAS_LIMIT, HAS_ALPHA)
    else:
        if HAS_LIMIT:
            total = tl.minimum(total, limit)
        out = activate(total, ACTIVATION)
    mask = real[:, None] & (channel < N)[None, :]
    out_ptr += place.to(tl.int64)[:, None] * N + channel[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def down_kernel(
    out_ptr, hidden_ptr, w_ptr, bias_ptr, x_scale_ptr, scale_ptr, zero_ptr, whole_ptr, routing_ptr,
    order_ptr, blocks_ptr,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, HAS_BIAS: tl.constexpr,
    DOT_TYPE: tl.constexpr, X_SCALES: tl.constexpr, SCALES: tl.constexpr,
    LEVELS: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_WHOLE: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Second product of one block and BLOCK_N channels, times the routing weights: rows of out are
    those of pairs.
    """
    expert, place, pair, real = _block(blocks_ptr, order_ptr, PAIRS, EXPERTS, BLOCK_M)
    # Blocks and order are older than the kernel in front, which has waited for them
    wait_for_inputs(OVERLAP)
    if tl.max(real.to(tl.int32), 0) == 0:
        return
    pair = pair.to(tl.int64)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = place.to(tl.int64)
    total = _rows_product(
        hidden_ptr, place, real, K, w_ptr, expert, channel, channel < N, x_scale_ptr, scale_ptr, zero_ptr, whole_ptr,
        K, N, N, X_SCALES, SCALES, LEVELS, GROUP, HAS_ZERO, HAS_WHOLE, STAGES, PTX,
        BLOCK_M, BLOCK_N, BLOCK_K, DOT_TYPE,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * N + channel, mask=channel < N, other=0.0).to(
            tl.float32
        )[None, :]
    total *= tl.load(routing_ptr + pair, mask=real, other=0.0).to(tl.float32)[:, None]
    mask = real[:, None] & (channel < N)[None, :]
    tl.store(
        out_ptr + pair[:, None] * N + channel[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def combine_experts_kernel(
    out_ptr, parts_ptr, ids_ptr, residual_ptr,
    TOP: tl.constexpr, N: tl.constexpr, EXPERTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up what a token's experts brought, in the order of its choices, and what is added to it."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP):
        expert = tl.load(ids_ptr + token * TOP + slot)
        known = (expert >= 0) & (expert < EXPERTS)
        part = tl.load(
            parts_ptr + (token * TOP + slot) * N + channel, mask=(channel < N) & known, other=0.0
        )
        total += part.to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * N + channel, mask=channel < N, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + token * N + channel, total.to(out_ptr.dtype.element_ty), mask=channel < N)

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""Linear layers over many tokens, with what stands behind them in a decoder in the same kernel.

With many tokens a product is bound by arithmetic, and a library's product is as fast as it gets; but
its result goes through memory once more for a gated activation, and the residual stream for the
addition. Here both happen in the registers that hold the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.linear.triton_silu_mul import activate


@triton.jit
def _place(tile, tiles_down, tiles_across, GROUP: tl.constexpr):
    """Return row and column of a tile: GROUP rows of tiles column by column, so that programs that
    run at once share rows and columns of the operands in the L2 cache.
    """
    first = tile // (GROUP * tiles_across) * GROUP
    height = min(tiles_down - first, GROUP)
    place = tile % (GROUP * tiles_across)
    return first + place % height, place // height


@triton.jit
def _scaled(sums, x_scale, weight_scale_ptr, row, inside, SCALED: tl.constexpr):
    """Return products of codes times the scales of tokens and of the weight's rows, in float32."""
    sums = sums.to(tl.float32)
    if SCALED:
        scale = tl.load(weight_scale_ptr + row, mask=inside, other=0.0).to(tl.float32)
        sums = sums * x_scale[:, None] * scale[None, :]
    return sums


@triton.jit
def tile_kernel(
    out, x, weight, residual, x_scale_ptr, weight_scale_ptr, rows, outputs, columns,
    ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SCALED: tl.constexpr, SUM: tl.constexpr,
    DOT_TYPE: tl.constexpr, OUT_TYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute the tiles [BM, BN] of the result that are this program's; all tensors are descriptors.

    Products are summed up in SUM. With an ACTIVATION the weight has `outputs` rows of gates, then as
    many of what they multiply.
    """
    down, across = tl.cdiv(rows, BM), tl.cdiv(outputs, BN)
    for tile in range(tl.program_id(0), down * across, PROGRAMS):
        m, n = _place(tile, down, across, GROUP)
        sums = tl.zeros((BM, BN), SUM)
        ups = tl.zeros((BM, BN), SUM)
        for k in range(0, columns, BK):
            left = x.load([m * BM, k]).to(DOT_TYPE)
            sums = tl.dot(left, weight.load([n * BN, k]).to(DOT_TYPE).T, sums, out_dtype=SUM)
            if ACTIVATION is not None:
                right = weight.load([outputs + n * BN, k]).to(DOT_TYPE)
                ups = tl.dot(left, right.T, ups, out_dtype=SUM)
        row = n * BN + tl.arange(0, BN)
        inside = row < outputs
        x_scale = 0.0
        if SCALED:
            token = m * BM + tl.arange(0, BM)
            x_scale = tl.load(x_scale_ptr + token, mask=token < rows, other=0.0)
        result = _scaled(sums, x_scale, weight_scale_ptr, row, inside, SCALED)
        if ACTIVATION is not None:
            up = _scaled(ups, x_scale, weight_scale_ptr, outputs + row, inside, SCALED)
            result = activate(result, ACTIVATION) * up
        if HAS_RESIDUAL:
            result += residual.load([m * BM, n * BN]).to(tl.float32)
        out.store([m * BM, n * BN], result.to(OUT_TYPE))

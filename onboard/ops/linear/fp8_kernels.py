# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""Rows of numbers in eight bits, floats or integers, with the norm or the gate before it in the same
pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.linear.cuda_fp8_codes import cuda_quantise, suits
from onboard.ops.linear.fp8_linear import BLOCK, SMALLEST_SCALE
from onboard.ops.linear.triton_silu_mul import activate
from onboard.ops.triton.launch import overlaps, power_of_two, power_of_two_in, processors
from onboard.ops.triton.overlap import wait_for_inputs

_PART = 1024
"""Columns of a row that are worth a program of their own."""


@triton.jit
def nearest(x):
    """Return the nearest integers, of two alike the even one: where 1.5 * 2^23 has its last bit."""
    x = tl.clamp(x, -4194304.0, 4194304.0)
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _numbers(x_ptr, column, columns, ACTIVATION: tl.constexpr):
    """Return a row's numbers at some columns, as its dtype has them, in float32; with ACTIVATION a
    row is gates, then what they multiply.
    """
    inside = column < columns
    loaded = tl.load(x_ptr + column, mask=inside, other=0.0)
    x = loaded.to(tl.float32)
    if ACTIVATION is not None:
        up = tl.load(x_ptr + columns + column, mask=inside, other=0.0).to(tl.float32)
        x = (activate(x, ACTIVATION) * up).to(loaded.dtype).to(tl.float32)
    return x


@triton.jit
def _normalised(x, factor, norm_ptr, column, columns, DTYPE: tl.constexpr):
    """Return numbers of a row times the norm's factor and weight, rounded as between separate
    steps.
    """
    weight = tl.load(norm_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    return ((x * factor).to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _quantise_kernel(
    out_ptr, scale_ptr, x_ptr, norm_ptr, given_ptr, columns, eps,
    HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GIVEN: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr,
    INTEGERS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise and quantise one of PARTS parts of a row of GROUPS groups of SIZE columns.

    Each part reads the whole row where its norm, or its one scale, is the row's.
    """
    wait_for_inputs(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    x_ptr += row * columns * (1 if ACTIVATION is None else 2)
    OF_ROW: tl.constexpr = GROUPS == 1 and PARTS > 1 and not GIVEN
    PART_GROUPS: tl.constexpr = max(1, GROUPS // PARTS)
    WIDTH: tl.constexpr = GROUPS * SIZE // PARTS
    if PARTS > 1 and (HAS_NORM or OF_ROW):
        every = tl.arange(0, GROUPS * SIZE)
        whole = _numbers(x_ptr, every, columns, ACTIVATION)
        if HAS_NORM:
            factor = tl.rsqrt(tl.sum(whole * whole, 0) / columns + eps)
            whole = _normalised(whole, factor, norm_ptr, every, columns, DTYPE)
        largest = tl.max(tl.abs(whole), 0)
    EACH: tl.constexpr = WIDTH // PART_GROUPS
    column = part * WIDTH + tl.arange(0, PART_GROUPS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    x = _numbers(x_ptr, column, columns, ACTIVATION)
    if HAS_NORM:
        if PARTS == 1:
            factor = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / columns + eps)
        x = _normalised(x, factor, norm_ptr, column, columns, DTYPE)
    if GIVEN:
        scale = tl.zeros([PART_GROUPS], tl.float32) + tl.load(given_ptr)
    else:
        if OF_ROW:
            most = tl.zeros([PART_GROUPS], tl.float32) + largest
        else:
            most = tl.max(tl.abs(x), 1)
        scale = tl.maximum(tl.div_rn(most, 127.5 if INTEGERS else 448.0), LEAST)
    codes = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if INTEGERS:
        codes = tl.clamp(nearest(codes), -128.0, 127.0)
    else:
        codes = tl.clamp(codes, -448.0, 448.0)
    tl.store(
        out_ptr + row * columns + column, codes.to(out_ptr.dtype.element_ty), mask=column < columns
    )
    group = part * GROUPS // PARTS + tl.arange(0, PART_GROUPS)
    count = tl.cdiv(columns, SIZE)
    stored = (group < count) & (part * GROUPS % PARTS == 0)
    tl.store(scale_ptr + row * count + group, scale, mask=stored)


def _parts(rows: int, groups: int, size: int, device: torch.device) -> int:
    """How many programs share a row, so that few long rows, too, are quantised on many processors."""
    most = groups if groups > 1 else size
    return power_of_two_in(min(processors(device) // max(1, rows), groups * size // _PART, most))


def quantise(
    x: Tensor,
    how: str,
    given: Tensor | None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    act: str = "",
    dtype: torch.dtype = torch.float8_e4m3fn,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `quantise_rows`, for int8 `quantise_int8_rows`, does of x [rows, columns], or of
    its RMSNorm, or of the product of its activated first half and its second, as one kernel. With
    `early` the next one may start before what this one waits for has ended: it has to be a product,
    which then reads weights and nothing else.
    """
    if dtype == torch.float8_e4m3fn and suits(x, norm, act):
        return cuda_quantise(x, how, given, norm, eps, act, early)
    rows, columns = len(x), x.shape[1] // 2 if act else x.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    size = BLOCK if how == "group" else power_of_two(columns)
    groups = triton.cdiv(columns, size)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    block = power_of_two(groups)
    parts = _parts(rows, block, size, x.device)
    _quantise_kernel[(rows, parts)](
        out, scale, x, norm, given, columns, eps,
        HAS_NORM=norm is not None, ACTIVATION=KERNEL_ACTIVATIONS[act] if act else None, GIVEN=how == "tensor",
        GROUPS=block, SIZE=size, PARTS=parts, LEAST=SMALLEST_SCALE, INTEGERS=dtype == torch.int8,
        num_warps=min(16, max(1, block * size // 256)), **overlaps(x.device),
    )  # fmt: skip
    return out, scale if how == "group" else scale.view(rows)

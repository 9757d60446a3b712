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
from onboard.ops.linear.fp8_linear import BLOCK, SMALLEST_SCALE
from onboard.ops.linear.triton_silu_mul import activate
from onboard.ops.triton.launch import overlaps, power_of_two
from onboard.ops.triton.overlap import wait_for_inputs


@triton.jit
def nearest(x):
    """Return the nearest integers, of two alike the even one: where 1.5 * 2^23 has its last bit."""
    x = tl.clamp(x, -4194304.0, 4194304.0)
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantise_kernel(
    out_ptr, scale_ptr, x_ptr, norm_ptr, given_ptr, columns, eps,
    HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GIVEN: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, LEAST: tl.constexpr,
    INTEGERS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise and quantise one row, in GROUPS groups of SIZE columns; with ACTIVATION a row is gates,
    then what they multiply.
    """
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    column = tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = column < columns
    if ACTIVATION is not None:
        x_ptr += row.to(tl.int64) * columns
    loaded = tl.load(x_ptr + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    x = loaded.to(tl.float32)
    if ACTIVATION is not None:
        up_ptr = x_ptr + (row.to(tl.int64) + 1) * columns
        up = tl.load(up_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = (activate(x, ACTIVATION) * up).to(loaded.dtype).to(tl.float32)
    if HAS_NORM:
        # Rounded as between separate steps
        factor = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / columns + eps)
        weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = (x * factor).to(loaded.dtype).to(tl.float32) * weight
        x = x.to(loaded.dtype).to(tl.float32)
    if GIVEN:
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(given_ptr)
    else:
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), 127.5 if INTEGERS else 448.0), LEAST)
    codes = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if INTEGERS:
        codes = tl.clamp(nearest(codes), -128.0, 127.0)
    else:
        codes = tl.clamp(codes, -448.0, 448.0)
    place = row.to(tl.int64) * columns + column
    tl.store(out_ptr + place, codes.to(out_ptr.dtype.element_ty), mask=inside)
    group = tl.arange(0, GROUPS)
    count = tl.cdiv(columns, SIZE)
    tl.store(scale_ptr + row * count + group, scale, mask=group < count)


def quantise(
    x: Tensor,
    how: str,
    given: Tensor | None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    act: str = "",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    """Return what `quantise_rows`, for int8 `quantise_int8_rows`, does of x [rows, columns], or of
    its RMSNorm, or of the product of its activated first half and its second, as one kernel.
    """
    rows, columns = len(x), x.shape[1] // 2 if act else x.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    size = BLOCK if how == "group" else power_of_two(columns)
    groups = triton.cdiv(columns, size)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    block = power_of_two(groups)
    _quantise_kernel[(rows,)](
        out, scale, x, norm, given, columns, eps,
        HAS_NORM=norm is not None, ACTIVATION=KERNEL_ACTIVATIONS[act] if act else None, GIVEN=how == "tensor",
        GROUPS=block, SIZE=size, LEAST=SMALLEST_SCALE, INTEGERS=dtype == torch.int8,
        num_warps=min(16, max(1, block * size // 512)), **overlaps(x.device),
    )  # fmt: skip
    return out, scale if how == "group" else scale.view(rows)

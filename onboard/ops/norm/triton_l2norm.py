# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""Scaling of vectors to length one: one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.norm.triton_rmsnorm import ELEMENTS, as_rows
from onboard.ops.triton.launch import overlaps, power_of_two, require_device
from onboard.ops.triton.overlap import wait_for_inputs


@triton.jit(do_not_specialize=["rows", "inner"])
def _l2norm_kernel(
    out_ptr, x_ptr, rows, inner, stride_outer, stride_inner, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Scale ROWS rows of x; row r lies at (r // inner) * stride_outer + (r % inner) *
    stride_inner.
    """
    wait_for_inputs(OVERLAP)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    start = (row // inner) * stride_outer + (row % inner) * stride_inner
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) + eps)
    place = out_ptr + row[:, None] * SIZE + column[None, :]
    tl.store(place, (x * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def _fake_l2norm(input: Tensor, eps: float) -> Tensor:
    return input.new_empty(input.shape)


@register_op(_fake_l2norm, row_wise=True)
def triton_l2norm(input: Tensor, eps: float) -> Tensor:
    """`torch_l2norm` as one kernel."""
    require_device(input)
    out, size = _fake_l2norm(input, eps), input.shape[-1]
    x, block = as_rows(input), power_of_two(size)
    rows, each = x.shape[0] * x.shape[1], max(1, ELEMENTS // block)
    if rows:
        _l2norm_kernel[(triton.cdiv(rows, each),)](
            out, x, rows, x.shape[1], x.stride(0), x.stride(1), eps,
            SIZE=size, BLOCK=block, ROWS=each, num_warps=min(16, max(1, block * each // 512)), **overlaps(x.device),
        )  # fmt: skip
    return out

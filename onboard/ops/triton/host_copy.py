# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""Copies by kernels, which read pinned host memory directly: a CUDA graph that begins with them
does not wait for a copy engine.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def copy_kernel(out_ptr, in_ptr, count, BLOCK: tl.constexpr):
    """Copy BLOCK numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(in_ptr + i, mask=i < count), mask=i < count)


@triton.jit
def copy_rows_kernel(out_ptr, in_ptr, widths_ptr, stride, BLOCK: tl.constexpr):
    """Copy BLOCK numbers of a row, those that are within its width."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(widths_ptr + row)
    tl.store(
        out_ptr + row * stride + i, tl.load(in_ptr + row * stride + i, mask=inside), mask=inside
    )


def copy_rows(target: Tensor, source: Tensor, widths: Tensor) -> None:
    """Copy the first `widths` [rows] int32 numbers of each row of a contiguous [rows, columns].

    The kernel reads the widths when it runs, so that a replay copies no more than the step needs.
    """
    rows, columns = target.shape
    copy_rows_kernel[(rows, triton.cdiv(columns, BLOCK))](
        target, source, widths, columns, BLOCK=BLOCK
    )


def copy(target: Tensor, source: Tensor) -> None:
    """Copy contiguous numbers; `source` and `target` may be pinned host memory."""
    copy_kernel[(triton.cdiv(target.numel(), BLOCK),)](target, source, target.numel(), BLOCK=BLOCK)

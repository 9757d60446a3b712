# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""A copy that a kernel makes: pinned memory of the host is read where it lies, without the wait for a copy engine."""

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


def copy(target: Tensor, source: Tensor) -> None:
    """Copy contiguous numbers; either may be pinned memory of the host."""
    copy_kernel[(triton.cdiv(target.numel(), BLOCK),)](target, source, target.numel(), BLOCK=BLOCK)

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Reading memory as fast as it goes: the measure of what memory-bound kernels reach."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = (2048, 4096, 8192)
"""Elements that a program reads at a time."""
_PROGRAMS = 4096


@triton.jit
def _sum_kernel(data, sums, each, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, each, BLOCK):
        places = program * each + start + tl.arange(0, BLOCK)
        inside = (start + tl.arange(0, BLOCK) < each) & (places < size)
        total += tl.load(data + places, mask=inside, other=0.0)
    tl.store(sums + program, tl.sum(total))


def read_all(data: Tensor, block: int = BLOCKS[0], programs: int = _PROGRAMS) -> Tensor:
    """Read every element of `data` (contiguous float32) once; return partial sums [programs]
    float32.
    """
    sums = torch.empty(programs, dtype=torch.float32, device=data.device)
    each = -(-data.numel() // programs)
    _sum_kernel[(programs,)](data, sums, each, data.numel(), BLOCK=block)
    return sums

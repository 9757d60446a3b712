# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""Look-up of a rank's tokens by one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.triton.launch import overlaps
from onboard.ops.triton.overlap import wait_for_inputs

_BLOCK = 1024


@triton.jit
def _lookup_kernel(
    out_ptr, ids_ptr, weight_ptr, first, tokens, size, stride, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + place).to(tl.int64) - first
    own = (row >= 0) & (row < tokens)
    x = tl.load(weight_ptr + row * stride + column, mask=(column < size) & own, other=0.0)
    tl.store(out_ptr + place * size + column, x, mask=column < size)


def lookup(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """`embedding_of_rank` on a GPU."""
    ids, [tokens, size] = ids.contiguous(), weight.shape
    assert weight.stride(1) == 1, "a row of a table lies in one piece"
    out = weight.new_empty((*ids.shape, size))
    if ids.numel() > 0:
        _lookup_kernel[(ids.numel(), triton.cdiv(size, _BLOCK))](
            out, ids, weight, first, tokens, size, weight.stride(0), BLOCK=_BLOCK,
            **overlaps(weight.device),
        )  # fmt: skip
    return out

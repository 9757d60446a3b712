# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel's part is written in Triton's language: its arguments have Triton's types.)
"""What the kernels of recurrences share; `onboard.ops.recurrences.advance` says which rows and slots
are whose.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def span(sequence, cu_seqlens_ptr, kv_lens_ptr, slots_ptr):
    """Return a sequence's first row, its number of new tokens, whether it has older ones, and the
    slot of its state.
    """
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    tokens = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32) - start.to(tl.int32)
    continues = tl.load(kv_lens_ptr + sequence) > tokens
    return start, tokens, continues, tl.load(slots_ptr + sequence).to(tl.int64)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), which is x where exp(x) would overflow."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def pairwise_decay(total, STRICT: tl.constexpr, CHUNK: tl.constexpr):
    """Return [l, s], what is left at token l of what token s <= l (STRICT: s < l) brought; `total`
    is cumulative.
    """
    later, earlier = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    seen = earlier < later if STRICT else earlier <= later
    return tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))


def chunk_options(most: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the length of a recurrence's chunks, at most `most`, and how their float32 operands
    are multiplied.

    States are float32 in any case; beside inputs of 16 bits the 10 bits of tf32 lose nothing that
    these had. Inputs of float32 take three such products each, and shorter chunks, since more of a
    chunk is in registers.
    """
    if dtype == torch.float32:
        return {"CHUNK": min(32, most), "PRECISION": "tf32x3", "num_warps": 8, "num_stages": 1}
    return {"CHUNK": most, "PRECISION": "tf32", "num_warps": 8, "num_stages": 1}

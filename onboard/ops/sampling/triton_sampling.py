"""Sampling on the device: launches of its kernels. No launch depends on a value, so a CUDA graph
can capture them; the host reads the tokens later, from pinned memory.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from onboard.ops.sampling.sampling import NOT_A_TOKEN
from onboard.ops.sampling.sampling_kernels import choose_kernel, fill_kernel, largest_kernel
from onboard.ops.triton.launch import last_contiguous, power_of_two

CHUNK = 4096
"""Logits of one program that looks for the largest."""
BLOCK = 2048
FILL = 128
_SHIFTS = {torch.bfloat16: 16}
"""Bits at the end of a float32 that are zero for every number of a type."""


def fill(input_ids: Tensor, latest: Tensor) -> Tensor:
    """Return contiguous `input_ids` with each placeholder token -n replaced by `latest[n]`."""
    out = torch.empty_like(input_ids)
    fill_kernel[(triton.cdiv(out.numel(), FILL),)](out, input_ids, latest, out.numel(), BLOCK=FILL)
    return out


def choose_and_keep(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    latest: Tensor,
    landed: Tensor,
    slots: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Choose tokens as `choose_tokens` does, and store each row's token under its slot.

    `latest` [slots] gets the token for the next step's input ids, 0 for NOT_A_TOKEN. `landed`
    [slots, 2], which may be pinned host memory, gets it unchanged in column `lengths % 2`: two
    steps in a row write different columns, so the host may read one while the next step runs.
    """
    logits = last_contiguous(logits)
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    largest = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    index = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest_kernel[(rows, chunks)](
        largest,
        index,
        logits,
        logits.stride(0),
        VOCABULARY=vocabulary,
        CHUNKS=chunks,
        BLOCK=CHUNK,
        num_warps=8,
    )
    choose_kernel[(rows,)](
        tokens, largest, index, logits, temperature, top_k, top_p, min_p, uniform,
        latest, landed, slots, lengths, logits.stride(0),
        VOCABULARY=vocabulary, CHUNKS=chunks, BLOCK_CHUNKS=power_of_two(chunks),
        SHIFT=_SHIFTS.get(logits.dtype, 0), NOT_A_TOKEN=NOT_A_TOKEN, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return tokens

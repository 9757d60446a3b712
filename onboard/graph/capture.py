"""Which decode batches are captured as CUDA graphs, and how a smaller batch is padded up to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from onboard.errors import UsageError

_PADDING = {"kv_lens": 1}
"""What a padding row holds where it is not zero: it is a sequence of one token in page 0 with one key."""


def capture_sizes(wanted: Sequence[int] | None, max_batch_size: int) -> list[int]:
    """Return the batch sizes to capture, ascending: those wanted, or powers of two and `max_batch_size`."""
    if wanted is None:
        powers = [1 << exponent for exponent in range(max_batch_size.bit_length())]
        return sorted({*powers, max_batch_size})
    if bad := [size for size in wanted if size < 1]:
        raise UsageError(f"CUDA graphs cannot be captured for batch size {bad[0]}", hint="Sizes start at 1")
    return sorted({size for size in wanted if size <= max_batch_size})


def pad_decode(inputs: Mapping[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """Return the metadata of a decode batch with padding sequences up to `size`.

    `inputs` are the graph's inputs without the caches (names, shapes and dtypes: docs/architecture.md); the first
    rows of the logits are those of the batch itself.
    """
    return {name: _pad(name, tensor, size) for name, tensor in inputs.items()}


def _pad(name: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    if name == "batch_info_host":
        info = tensor.clone()
        info[:2] = size
        return info
    if name == "cu_seqlens":
        return torch.arange(size + 1, dtype=tensor.dtype, device=tensor.device)
    if name == "logits_gather_indices":
        return torch.arange(size, dtype=tensor.dtype, device=tensor.device)
    if name.startswith("block_table"):
        return F.pad(tensor, (0, 0, 0, size - tensor.shape[0]))
    return F.pad(tensor, (0, size - tensor.shape[-1]), value=_PADDING.get(name, 0))

"""Which tokens each row of a step may get: bits, found by the host and applied on the device."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onboard.ops import has_triton

_WORD = 64
_FREE = -1


class TokenMasks:
    """Masks of some rows of logits; at first every token is allowed."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        words = -(-vocabulary // _WORD)
        self.numbers: npt.NDArray[np.int64] = np.full((rows, words + 1), _FREE, dtype=np.int64)
        """[rows, words + 1] the bits of each row, token 0 first, and the token that it gets where
        none is left; below 0: none, the row is free.
        """

    def of(self, row: int, last: int) -> npt.NDArray[np.uint8]:
        """Return the bits of a row, [bytes], to be written; where none is left it gets the token
        `last`.
        """
        self.numbers[row, -1] = last
        return self.numbers[row, :-1].view(np.uint8)

    def on(self, device: torch.device) -> Tensor:
        """Return `numbers` on a device, which may still have to copy them."""
        numbers = torch.from_numpy(self.numbers)
        if device.type == "cuda":
            numbers = numbers.pin_memory()
        return numbers.to(device, non_blocking=True)


def masked(logits: Tensor, numbers: Tensor) -> Tensor:
    """Return logits [rows, vocabulary] without the tokens that are not allowed, which get -inf.

    `numbers` are those of `TokenMasks`, on the device of the logits. Nothing waits for the device,
    and no launch depends on a value: a CUDA graph can hold it.
    """
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = numbers[:, :-1].view(torch.uint8)[:, :, None] >> places & 1
    kept = bits.flatten(1)[:, : logits.shape[1]].bool()
    left = torch.where(kept, logits, float("-inf"))
    last = numbers[:, -1:]
    nothing = (left == float("-inf")).all(-1, keepdim=True) & (last >= 0)
    column = last.clamp(min=0)
    return left.scatter(1, column, torch.where(nothing, 0.0, left.gather(1, column)))


class MaskBuffer:
    """Masks at addresses that a captured CUDA graph reads: in pinned host memory, and on the device.

    The host writes the masks of a step when it has the tokens of the one before, and so after the
    copy of that one's masks.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        shape, cuda = TokenMasks(rows, vocabulary).numbers.shape, device.type == "cuda"
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=cuda)
        self._device = torch.zeros(shape, dtype=torch.int64, device=device)
        self._copy = (
            import_module("onboard.ops.triton.host_copy").copy
            if cuda and has_triton()
            else Tensor.copy_
        )

    def write(self, masks: TokenMasks) -> None:
        """Write the masks of a step's first rows, for the next `fetch`."""
        self._host.numpy()[: len(masks.numbers)] = masks.numbers

    def fetch(self, rows: int) -> Tensor:
        """Copy the masks of the first rows to the device; return them there.

        Called while a CUDA graph is captured: each replay copies what the host has written then.
        """
        self._copy(self._device[:rows], self._host[:rows])
        return self._device[:rows]

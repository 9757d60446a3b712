"""One side's logits on disk, while the other side's model has the device.

Float32 in a file of a temporary folder, which `TMPDIR` chooses: 2,048 positions of 151,936 tokens
take 1.2 GB. Nothing is rounded or left out, and no model is loaded twice.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from onboard.errors import UsageError
from onboard.gpu import gib

MOST_BYTES = 32 * 2**30
"""The largest file that is written."""


class StoredLogits:
    """Logits [positions, vocabulary] float32, written in order and read in order."""

    def __init__(self, folder: Path, positions: int, vocabulary: int) -> None:
        """Make room for them in `folder`; raise `UsageError` where there is none."""
        needed = 4 * positions * vocabulary
        if needed > (room := min(MOST_BYTES, shutil.disk_usage(folder).free)):
            raise UsageError(
                f"the logits of A take {gib(needed)}, and {folder.parent} has room for {gib(room)}",
                hint="Lower --tokens, or set TMPDIR to a folder with more room",
            )
        shape = positions, vocabulary
        self._rows = np.memmap(folder / "logits.f32", dtype=np.float32, mode="w+", shape=shape)
        self._written = 0

    def append(self, rows: torch.Tensor) -> None:
        """Write the next positions' logits, [positions, vocabulary] float32 on the CPU."""
        end = self._written + len(rows)
        self._rows[self._written : end] = rows.numpy()
        self._written = end

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return the logits of `count` positions, which are not to be written to."""
        return torch.from_numpy(self._rows[start : start + count])

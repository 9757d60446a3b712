"""Random weights in integers of eight bits, and what they stand for, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """A weight as the ops take it, and its values in float64."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    values: Tensor


def weight(outputs: int, inputs: int, group: int, *, offset: bool) -> Weight:
    """A random weight, with an offset for each group or without."""
    codes = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
    groups = -(-inputs // group)
    scale = (torch.rand(outputs, groups) / 100).half()
    offsets = torch.randn(outputs, groups) / 10 if offset else None
    column = torch.arange(inputs) // group
    values = codes.double() * scale.double()[:, column]
    if offsets is not None:
        values = values + offsets.double()[:, column]
    return Weight(codes, scale, offsets, values)


def naive_rows(x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Integers of rows, number by number, and their scales [rows, 1]."""
    codes, scales = torch.zeros(x.shape, dtype=torch.int32), torch.zeros(len(x), 1)
    for i, row in enumerate(x):
        largest = max(abs(float(value)) for value in row)
        scales[i] = float(given) if given is not None else max(largest / 127.5, 1e-12)
        for k, value in enumerate(row):
            codes[i, k] = min(127, max(-128, round(float(value / scales[i, 0]))))
    return codes, scales

"""How many dimensions the positions have with which code looks rows up in tables: [sequence], or
[1, sequence], which gives the rows a dimension in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from onboard.codegen.translate.mechanisms.layouts.seen_ranks import LENGTH, seen_ranks


def lookup_ranks(model: nn.Module) -> frozenset[int]:
    """Return the numbers of dimensions of positions that a model looks rows of tables up with."""
    return seen_ranks(model, _of_positions)


def _of_positions(function: Any, args: Any) -> Iterator[int]:
    """Yield the number of dimensions of positions in `table[positions]`."""
    if function is torch.ops.aten.index:
        match args:
            case (table, [torch.Tensor() as where]) if _counts(where) and table.dim() == 2:
                yield where.dim()


def _counts(where: torch.Tensor) -> bool:
    """Whether indices are the positions of a text."""
    return where.shape[-1:] == (LENGTH,) and bool((where.diff() == 1).all())

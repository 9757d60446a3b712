"""Tables of positions that a model's code cuts to the text's length, and generated code looks up
whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def cut_tables(block: nn.Module, output: Any, expected: Any) -> Any:
    """Return a block's output with only the rows that transformers' has, where each of its tensors
    is a table with more; the output itself where that is not so, or the block has parameters.
    """
    if any(True for _ in block.parameters()):
        return output
    ours = output if isinstance(output, tuple) else (output,)
    theirs = expected if isinstance(expected, tuple | list) else (expected,)
    tensors = all(isinstance(item, torch.Tensor) for item in (*ours, *theirs))
    if not tensors or len(ours) != len(theirs):
        return output
    cut = [_first_rows(one, other) for one, other in zip(ours, theirs, strict=True)]
    if any(item is None for item in cut):
        return output
    return tuple(cut) if isinstance(output, tuple) else cut[0]


def rows_for_each_text(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a table [positions, ...] of at least as many as a text has tokens, the same for all
    texts, in the form of `rows` [batch, sequence, ...]; the table itself where it is something
    else.

    The table may have dimensions of size one for texts or heads, which rows have none of, or be
    [1, 1, positions, size] where they are [batch, 1, sequence, size].
    """
    if table.shape == rows.shape:
        return table
    if table.dim() == rows.dim() == 4 and table.shape[:2] == (1, 1) and rows.shape[1] == 1:
        enough = table.shape[2] >= rows.shape[2] and table.shape[3] == rows.shape[3]
        return table[:, :, : rows.shape[2]].expand_as(rows) if enough else table
    ones = [place for place in range(1, table.dim()) if table.shape[place] == 1]
    bare = table.squeeze(tuple(ones[: max(0, table.dim() - rows.dim() + 1)]))
    alike = bare.dim() == rows.dim() - 1 > 1 and bare.shape[1:] == rows.shape[2:]
    if not alike or len(bare) < rows.shape[1]:
        return table
    return bare[: rows.shape[1]].expand_as(rows)


def _first_rows(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor | None:
    """Return the first rows of a table, as many as the other one has; None where they differ in
    something else.
    """
    if ours.dim() != theirs.dim():
        return None
    sizes = list(enumerate(zip(ours.shape, theirs.shape, strict=True)))
    other = [(place, theirs_) for place, (ours_, theirs_) in sizes if ours_ != theirs_]
    if len(other) != 1 or other[0][0] == ours.dim() - 1:
        return None
    (place, rows), *_ = other
    return ours.narrow(place, 0, rows) if rows < ours.shape[place] else None

"""Rows of logits that rounding tears from what they should be: where a router's scores lie within
rounding, another expert computes a token, and its row, and those of later tokens that read it, err many
times as much as others.

How many rows that are is chance, and a few of them are most of an error over all rows; so two right
models of one precision differ by more than a fifth there, while their other rows err alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import MARGIN, MARGIN_OF_TORN, TORN


def row_errors(rows: Tensor, exact: Tensor) -> Tensor:
    """Return the error of each row of logits [rows, vocabulary], relative, [rows] float64."""
    wide, expected = rows.double(), exact.double()
    size = torch.linalg.vector_norm(expected, dim=-1).clamp_min(1e-30)
    errors: Tensor = torch.linalg.vector_norm(wide - expected, dim=-1) / size
    return errors


def torn(errors: Tensor) -> Tensor:
    """Return which rows err many times as much as half of them do; a NaN is no such row."""
    return errors > TORN * errors.median()


def torn_limit(
    ours: Sequence[Tensor], own: Sequence[Tensor], exact: Sequence[Tensor], floor: float
) -> tuple[float, int] | None:
    """Return the limit of our error over all rows where torn rows are most of the reference's own, and
    how many these are; None where they are not, or our other rows err more than its.

    Args:
        ours, own, exact: logits [rows, vocabulary] of each passage: ours, and the reference's in the
            run's dtype and in float32.
        floor: by which ours may err besides, in any row.
    """
    mine, theirs, expected = (torch.cat(list(each)) for each in (ours, own, exact))
    errors, usual = row_errors(theirs, expected), row_errors(mine, expected).median()
    whole, count = rmse_ratio(theirs, expected), int(torn(errors).sum())
    if not count or whole < MARGIN_OF_TORN * float(errors.median()):
        return None
    alike = bool(usual <= MARGIN * errors.median() + floor)
    return (MARGIN_OF_TORN * whole + floor, count) if alike else None


def excused(far: Tensor, ours: Sequence[Tensor], own: Tensor, exact: Tensor) -> Tensor:
    """Return which of the choices that are `far` [rows] from the best lie in torn rows: none where ours
    has more such choices than the reference has torn rows, and a fifth.

    Args:
        far: [rows], of the rows in which tokens were chosen.
        ours: our logits of these rows [rows, vocabulary], each way that they were computed.
        own, exact: the reference's, as in `torn_limit`.
    """
    found = far & torch.stack([torn(row_errors(rows, exact)) for rows in ours]).any(dim=0)
    most = MARGIN * int(torn(row_errors(own, exact)).sum())
    return found if int(found.sum()) <= most else torch.zeros_like(found)

"""Whether a model reads texts: each row of `input_ids` one, with one token at a position."""

from __future__ import annotations

import torch
from torch import nn

from onboard.analysis.tiny.tiny_model import prompt
from onboard.errors import OnboardError

_MOST_ROWS = 16


def check_rows(model: nn.Module) -> None:
    """Refuse a model to which several rows are one text, as to one that has a row for each of its
    codebooks.
    """
    if (rows := rows_of_a_text(model)) > 1:
        raise OnboardError(
            f"{type(model).__name__} reads {rows} rows of input_ids as one text, a token of each at every position",
            hint="Only texts of one token a position can be generated",
        )


@torch.no_grad()
def rows_of_a_text(model: nn.Module) -> int:
    """Return n where a transformers model runs with n and 2 n rows and with no number between; 1
    where that is none.
    """
    ids = prompt(0, batch=2 * _MOST_ROWS)["input_ids"]
    rows = next((count for count in range(1, _MOST_ROWS + 1) if _runs(model, ids[:count])), 1)
    between = any(_runs(model, ids[:count]) for count in range(rows + 1, 2 * rows))
    return rows if not between and _runs(model, ids[: 2 * rows]) else 1


def _runs(model: nn.Module, ids: torch.Tensor) -> bool:
    try:
        model(input_ids=ids, use_cache=False)
    except Exception:  # whatever a model's own code raises for a shape that it does not take
        return False
    return True

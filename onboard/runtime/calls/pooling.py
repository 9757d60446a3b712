"""One vector of the hidden states of a text."""

from __future__ import annotations

from typing import Literal

import torch

from onboard.errors import UsageError

Pooling = Literal["last", "mean"]
"""last: the last token's state, which alone depends on the whole text; mean: of all tokens."""


def pooled(states: torch.Tensor, pooling: Pooling, *, normalize: bool) -> torch.Tensor:
    """Return a vector [hidden] of states [tokens, hidden], of length one if that is wanted.

    Raises `UsageError` for a pooling that is not known.
    """
    if pooling not in ("last", "mean"):
        raise UsageError(f"pooling is {pooling!r:.60}", hint="Known are last and mean")
    vector = states[-1] if pooling == "last" else states.mean(dim=0)
    return torch.nn.functional.normalize(vector, dim=-1) if normalize else vector

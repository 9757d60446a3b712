"""The logits of a step's rows as their requests want them, and the tokens that these may get."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onboard.cache.token_masks import TokenMasks
from onboard.runtime.scheduling.request import Request

Wanted = Sequence[tuple[int, Request]]
"""(row, request) where a request wants something of its next token."""


def token_masks(wanted: Wanted, rows: int, vocabulary: int) -> TokenMasks:
    """Return the tokens that each of several rows may get, those of requests that go on."""
    masks = TokenMasks(rows, vocabulary)
    for row, request in wanted:
        if request.finish_reason is None:
            assert request.adjustments is not None
            kept = masks.of(row, request.adjustments.eos)
            request.adjustments.exclude(kept, request.generated)
    return masks


def changed_logits(logits: torch.Tensor, wanted: Wanted) -> torch.Tensor | None:
    """Return logits [rows, vocabulary] with biases and penalties, float32; None where there are
    none.
    """
    changing = [
        (row, request)
        for row, request in wanted
        if request.adjustments is not None and request.adjustments.changes_values
    ]
    if not changing:
        return None
    changed = logits.to(torch.float32, copy=True)
    for row, request in changing:
        assert request.adjustments is not None
        request.adjustments.change(changed[row], request.prompt, request.generated)
    return changed

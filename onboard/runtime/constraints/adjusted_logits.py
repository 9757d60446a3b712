"""The logits of a step's rows as their requests want them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onboard.runtime.scheduling.request import Request


def adjusted_logits(logits: torch.Tensor, wanted: Sequence[tuple[int, Request]]) -> torch.Tensor:
    """Return logits [rows, vocabulary] as the requests of some rows want them, float32."""
    changed = logits.to(torch.float32, copy=True)
    for row, request in wanted:
        assert request.adjustments is not None
        request.adjustments.apply(changed[row], request.prompt, request.generated)
    return changed

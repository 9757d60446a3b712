"""What functions of modeling code return as masks."""

from __future__ import annotations

import torch
from torch import nn

from onboard.analysis.recognise.mask_makers import mask_makers
from onboard.analysis.tiny.tiny_sizes import VOCABULARY


def pair(slen: int, padding: torch.Tensor | None, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of padding, and which tokens each token sees."""
    rows = torch.arange(slen)
    seen = (rows <= rows[:, None]) & (rows > rows[:, None] - window)
    return torch.ones(2, slen) == 1 if padding is None else padding, seen.repeat(2, 1, 1)


class Masking(nn.Module):
    """Makes masks, and uses none."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.head = nn.Embedding(VOCABULARY, 8)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> object:
        pair(input_ids.shape[1], attention_mask, self.window)
        return type("Output", (), {"logits": self.head(input_ids)})


def test_a_pair_of_masks_is_known_by_what_it_holds() -> None:
    assert mask_makers(Masking(window=1000)) == {"pair": ["ones", "seen"]}


def test_a_mask_with_a_window_is_none() -> None:
    assert mask_makers(Masking(window=5)) == {}

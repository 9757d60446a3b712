"""Of a small model whose logits err by more than the limit many texts tell whether that is rounding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onboard.verify.rounding.of_texts import rounds_alike

WORDS = 256


class Erring(nn.Module):
    """A model whose logits err by so much in float32, relative to their size, and nowhere else."""

    def __init__(self, table: torch.Tensor, error: float, often: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.error, self.often = error, often

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logits = self.table[input_ids]
        wide = logits.dtype == torch.float64 or torch.rand(()) > self.often
        size = 0.0 if wide else self.error * torch.rand(()) * 2
        return SimpleNamespace(logits=logits + size * torch.randn_like(logits))


@pytest.mark.parametrize(
    ("error", "often", "alike"),
    [(2e-5, 1.0, True), (2e-7, 1.0, True), (8e-5, 1.0, False), (1e-3, 0.2, False)],
)
def test_what_errs_as_the_reference_does_is_rounding(
    error: float, often: float, alike: bool
) -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    torch.manual_seed(seed)
    table = torch.randn(WORDS, 50)
    reference, model = Erring(table, 2e-5), Erring(table, error, often)
    text = {"input_ids": torch.randint(WORDS, (1, 1))}
    assert rounds_alike(reference, model, text, WORDS) is alike


def test_what_is_wrong_in_each_text_is_none() -> None:
    table = torch.randn(WORDS, 50)
    reference, model = Erring(table, 1e-6), Erring(table * (1 + 2e-5), 0.0)
    assert not rounds_alike(reference, model, {"input_ids": torch.randint(WORDS, (2, 3))}, WORDS)

"""Positions counted along a mask of ones are the given ones; along any other they are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.graph.harness import transform, worst_error

KEY = "match_counted_tokens"
Mask = Callable[[Tensor], Tensor]
ONES: dict[str, Mask] = {
    "ones": lambda ids: torch.ones(ids.shape[0], ids.shape[1]),
    "like": lambda ids: torch.ones_like(ids),
    "full": lambda ids: torch.full((ids.shape[0], ids.shape[1]), 1.0),
    "truths": lambda ids: torch.ones(ids.shape, dtype=torch.bool),
    "asked": lambda ids: torch.ones_like(ids).ne(0).int(),
}
OTHERS: dict[str, Mask] = {
    "twos": lambda ids: torch.full((ids.shape[0], ids.shape[1]), 2.0),
    "of tokens": lambda ids: ids.ne(3).int(),
    "zeros": lambda ids: torch.zeros_like(ids),
    "opposite": lambda ids: torch.ones_like(ids).ne(1).int(),
}


class _Counted(nn.Module):
    """A table looked up at counted positions."""

    def __init__(self, mask: Mask, dim: int = 1) -> None:
        super().__init__()
        self.mask, self.dim = mask, dim
        self.table = nn.Embedding(64, 6)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        mask = self.mask(input_ids).long()
        numbers = (torch.cumsum(mask, dim=self.dim).type_as(mask) * mask).long() - 1
        return self.table(numbers + 2)


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    positions = torch.arange(sequence).expand(batch, -1).contiguous()
    return {"input_ids": torch.randint(9, (batch, sequence)), "position_ids": positions}


@pytest.mark.parametrize("name", ONES)
def test_numbers_of_tokens_are_their_positions(name: str) -> None:
    model = _Counted(ONES[name], dim=-1 if name == "like" else 1)
    result = transform([KEY], model, _inputs(2, 9))
    assert result.matches[KEY] == 1
    assert result.count(torch.ops.aten.cumsum) == 0
    assert worst_error(result, model, _inputs) < 1e-6


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay(name: str) -> None:
    assert transform([KEY], _Counted(OTHERS[name]), _inputs(2, 9)).matches[KEY] == 0


def test_a_sum_over_texts_stays() -> None:
    assert transform([KEY], _Counted(ONES["like"], dim=0), _inputs(2, 9)).matches[KEY] == 0

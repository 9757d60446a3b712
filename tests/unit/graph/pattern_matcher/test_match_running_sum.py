"""Sums of all tokens up to each are the linear recurrence with a decay of one; other sums stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.graph.harness import transform

KEY = "match_running_sum"
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels": lambda x: x.cumsum(1),
    "numbers": lambda x: x[..., 0].cumsum(-1),
    "products": lambda x: (x[..., None] * x[:, :, None]).cumsum(dim=1),
    "heads": lambda x: x.unflatten(2, (2, 3)).transpose(1, 2).cumsum(-2),
    "wider": lambda x: x.cumsum(1, dtype=torch.float64),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "along channels": lambda x: x.cumsum(2),
    "along texts": lambda x: x.cumsum(0),
    "integers": lambda x: (x > 0).cumsum(1),
    "products": lambda x: x.cumprod(1),
}


class _Model(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.way = nn.Embedding(50, 6), way

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.way(self.words(input_ids))


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(50, (batch, sequence))}


@pytest.mark.parametrize("key", WAYS)
def test_a_running_sum_is_the_recurrence(key: str) -> None:
    model = _Model(WAYS[key]).requires_grad_(False)
    result = transform([KEY], model, _inputs(2, 9))
    assert result.matches[KEY] == result.count(torch.ops.onboard.torch_linear_recurrence) == 1
    given = _inputs(3, 31)
    actual, expected = result.gm(**given), model(**given)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("key", OTHERS)
def test_another_sum_stays(key: str) -> None:
    model = _Model(OTHERS[key]).requires_grad_(False)
    assert transform([KEY], model, _inputs(2, 9)).matches[KEY] == 0

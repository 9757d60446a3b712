"""A zero before the text without its last token is the token shift; what only looks like one is
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.graph.harness import randomize, transform, worst_error

KEY = "match_token_shift"
CHANNELS = 6


class _Shift(nn.Module):
    """A linear of the token before; `first` (0 or 1) is the token before the text, `end` what is
    cut off of it.
    """

    def __init__(self, bias: bool = False, first: float = 0.0, end: int = -1) -> None:
        super().__init__()
        self.linear, self.first, self.end = nn.Linear(CHANNELS, CHANNELS, bias=bias), first, end
        randomize(self, seed=int(torch.randint(1 << 30, ())))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[0], 1, CHANNELS)
        before = x.new_full(size, self.first) if self.first else x.new_zeros(size)
        return torch.cat([self.linear(before), self.linear(x)[:, : self.end]], dim=1)


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, sequence, CHANNELS)}


def test_zero_and_all_tokens_but_the_last_are_the_token_shift() -> None:
    model = _Shift()
    result = transform([KEY], model, _inputs(2, 9))
    assert result.matches[KEY] == result.count(torch.ops.onboard.torch_token_shift) == 1
    assert worst_error(result, model, _inputs) < 1e-6


class _Apart(_Shift):
    """What comes before the text goes through a linear of its own."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.other = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        before = self.other(x.new_zeros(x.shape[0], 1, CHANNELS))
        return torch.cat([before, self.linear(x)[:, :-1]], dim=1)


def test_a_bias_before_the_text_is_the_layers_own() -> None:
    model = _Shift(bias=True)
    result = transform([KEY], model, _inputs(2, 9))
    assert result.matches[KEY] == result.count(torch.ops.onboard.torch_token_shift) == 1
    assert worst_error(result, model, _inputs) < 1e-6


class _Moved(nn.Module):
    """A text that is moved in one of the ways of `_MOVED`."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x)


_MOVED = {
    "padded": lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "padded and cut": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "padding that cuts": lambda x: F.pad(x, (0, 0, 1, -1)),
    "by three": lambda x: F.pad(x[:, :-3], (0, 0, 3, 0)),
    "zeros of three": lambda x: torch.cat([torch.zeros_like(x[:, :3]), x[:, :-3]], dim=1),
}
_IDS = {
    "ids": lambda x: F.pad(x[:, :-1], (1, 0)),
    "ids behind another": lambda x: F.pad(x[:, :-2], (2, 0), value=7),
    "ids that are cut": lambda x: F.pad(x, (1, 0), value=-1)[:, :-1],
    "joined ids": lambda x: torch.cat([torch.full_like(x[:, :1], 5), x[:, :-1]], dim=1),
}


def _ids(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"x": torch.randint((1 << 24) - 9, (batch, sequence))}


@pytest.mark.parametrize("key", [*_MOVED, *_IDS])
def test_a_text_that_is_moved_is_shifted_as_often(key: str) -> None:
    ways: dict[str, Any] = _MOVED | _IDS
    model, inputs = _Moved(ways[key]), _ids if key in _IDS else _inputs
    result = transform(["cleanup_noop_slice", KEY], model, inputs(2, 9))
    assert result.matches[KEY] == 1
    times = {"by three": 3, "zeros of three": 3, "ids behind another": 2}.get(key, 1)
    assert result.count(torch.ops.onboard.torch_token_shift) == times
    given = inputs(3, 11)
    assert torch.equal(result.gm(**given), model(**given))


@pytest.mark.parametrize(
    "way",
    [
        lambda x: F.pad(x[:, :-1], (0, 0, 2, 0)),
        lambda x: F.pad(x[:, 1:], (0, 0, 0, 1)),
        lambda x: F.pad(x[:, :-1], (0, 0, 1, 0), value=1.0),
        lambda x: F.pad(x, (1, -1, 0, 0)),
        lambda x: F.pad(x[:, :-1].transpose(1, 2), (1, 0), mode="replicate").transpose(1, 2),
        lambda x: F.pad(x[:, :-1], (0, 0, 1, 0, 1, 0)),
    ],
)
def test_another_move_stays(way: Callable[[Tensor], Tensor]) -> None:
    assert transform([KEY], _Moved(way), _inputs(2, 9)).matches[KEY] == 0


@pytest.mark.parametrize(
    "model", [_Apart(), _Shift(bias=True, first=1.0), _Shift(first=1.0), _Shift(end=-2)]
)
def test_another_first_token_or_another_shift_stays(model: nn.Module) -> None:
    assert transform([KEY], model, _inputs(2, 9)).matches[KEY] == 0

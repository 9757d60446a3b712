"""Variables that a loop over layers binds first, read behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.codegen.test_own_code import _made, _with_parts

Translate = Callable[..., tuple[Any, str, str]]

LAYERS = """
class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)

    def forward(self, x):
        h = self.inner(x)
        return h.tanh(), h


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.gate = nn.Linear(config.size, config.size)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            y, hidden = layer(x)
            more = y * hidden
            x = x + y
        BEHIND
        return x
"""
SIZES = {"size": 8, "layers": 3}


@pytest.mark.parametrize(
    "behind",
    [
        "x = x + hidden",
        "x = x + more * hidden",
        "x = self.gate(y)",
        "x = x / (i + 1)",
        "x = layer(x)[0]",
        "x = x + layer.inner.weight.sum()",
        "more = more + 1\n        x = x * more",
        "more += 1\n        x = x * more",
        "for layer in self.layers:\n            y, hidden = layer(x + hidden)\n        x = hidden",
    ],
)
def test_what_the_last_turn_of_a_loop_has_left_is_read_behind_it(
    behind: str, translate: Translate
) -> None:
    text = LAYERS.replace("BEHIND", behind)
    state, _, _ = translate(text, SIZES, specialised=True)
    ours, theirs = _made(_with_parts(state), SIZES), _made(text, SIZES)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


def test_what_only_some_turns_bind_is_as_unknown_behind_a_loop(translate: Translate) -> None:
    text = LAYERS.replace("more = y * hidden", "if x.sum() > 0:\n                more = y * hidden")
    text = text.replace("BEHIND", "x = x + more")
    state, _, _ = translate(text, SIZES, specialised=True)
    ours, theirs = _made(_with_parts(state), SIZES), _made(text, SIZES)
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    for model in (ours, theirs):
        with pytest.raises(UnboundLocalError):
            model(x - 100.0)


def test_a_variable_of_each_of_two_loops_is_carried_by_none(translate: Translate) -> None:
    again = "for layer in self.layers:\n            y, hidden = layer(x)\n            x = x + y"
    _, _, forward = translate(LAYERS.replace("BEHIND", again), SIZES, specialised=True)
    assert "hidden" not in forward

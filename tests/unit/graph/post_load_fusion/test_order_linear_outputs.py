"""Outputs of linear layers that are shuffled before they are used come in the right order from the
start.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import onboard.ops  # noqa: F401
from onboard.graph.weight_load.parameters import is_as_loaded, mark_loaded
from tests.support.graph.fusion import apply, exported, random_state, targets
from tests.support.graph.harness import rmse

HEADS, SIZE = 3, 4


class Layer(nn.Module):
    """q, k and a gate of each head side by side in one projection, as hybrid models have them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.both = nn.Linear(8, HEADS * (3 * SIZE + 1) + 2, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads, _ = self.both(x).split([HEADS * (3 * SIZE + 1), 2], -1)
        q, k, gate, rate = heads.view(batch, length, HEADS, -1).split([SIZE, SIZE, SIZE, 1], 3)
        q, k = q.reshape(batch, length, -1), k.reshape(batch, length, -1)
        mixed = torch.cat((q, k), -1).tanh()
        gate = gate.reshape(-1, SIZE).sigmoid().view(batch, length, -1)
        return mixed[..., : HEADS * SIZE] * gate + rate.reshape(batch, length, HEADS).exp().repeat(
            1, 1, SIZE
        )


class Plain(Layer):
    """Parts that lie side by side already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.both(x).split([10, 10, 21], -1)
        return q.tanh() * k


class Twice(Layer):
    """Two readers of the same shuffled channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.both(x)
        heads = whole[..., :39].view(*x.shape[:2], HEADS, -1)
        return (
            super().forward(x).sum()
            + heads[..., :2].reshape(-1, 6).tanh().sum()
            + whole.sin().sum()
            + x
        )


@pytest.mark.parametrize("bias", [False, True])
def test_shuffled_outputs_are_ordered(bias):
    model = Layer(bias)
    model.load_state_dict(random_state(model, random.randrange(10**6)))
    gm, _, _ = apply("cleanup_input_constraints", exported(model, 2, 3, 8, device="cpu"))
    for parameter in gm.parameters():
        mark_loaded(parameter)
    gm, info, _ = apply("order_linear_outputs", gm)
    assert info.num_matches == 1
    # A saved graph would load the old order
    assert not any(is_as_loaded(parameter) for parameter in gm.parameters())
    assert not any(target.startswith(("cat", "split")) for target in targets(gm))
    for shape in ((1, 5, 8), (4, 1, 8)):
        x = torch.randn(shape)
        assert rmse(gm(x), model(x)) <= 1e-6


@pytest.mark.parametrize("cls", [Plain, Twice])
def test_others_stay(cls):
    model = cls()
    gm, _, _ = apply("cleanup_input_constraints", exported(model, 2, 3, 8, device="cpu"))
    gm, info, _ = apply("order_linear_outputs", gm)
    assert info.num_matches == 0
    x = torch.randn(2, 5, 8)
    assert rmse(gm(x), model(x)) <= 1e-6


def test_nothing_happens_before_weights_are_loaded():
    _, info, _ = apply("order_linear_outputs", exported(Layer(), 2, 3, 8))
    assert info.num_matches == 0

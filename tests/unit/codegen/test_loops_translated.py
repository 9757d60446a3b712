"""Loops along the sequence, written as the ops that the analysis found them to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.analysis.spec_blocks import LoopParameters
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

SELECTING = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.rates = nn.Parameter(torch.linspace(-1, 1, 12).view(config.size, 3))

    def forward(self, x, cache=None):
        _, length, _ = x.shape
        u = x.transpose(1, 2)
        B, C = x.tanh()[..., :3], x.flip(1)[..., 1:]
        steps = x.flip(2)
        steps = nn.functional.softplus(steps).transpose(1, 2)
        A = -torch.exp(self.rates)
        kept = torch.exp(A[None, :, None, :] * steps[:, :, :, None])
        added = steps[:, :, :, None] * B[:, None, :, :] * u[:, :, :, None]
        state, pieces = torch.zeros((x.shape[0], 4, 3)), []
        for i in range(length):
            state = kept[:, :, i, :] * state + added[:, :, i, :]
            piece = torch.matmul(state, C[:, i, :].unsqueeze(-1))
            pieces.append(piece[:, :, 0])
        out = torch.stack(pieces, dim=-1)
        if cache is not None:
            cache.copy_(state)
        return out * u.sigmoid()
"""


SIZES = {"size": 4}
FOUND = LoopParameters(
    op="torch_selective_scan",
    arguments=["u", "steps", "A", "B", "C"],
    turned=["u", "steps"],
    result="pieces",
    joined=1,
    stacked=True,
    method="forward",
    index=0,
)


@pytest.mark.parametrize("dim", ["dim=-1", "2", "dim=1"])
def test_a_selective_scan_gets_its_steps_before_the_softplus(
    dim: str, translate: Translate
) -> None:
    text = SELECTING.replace("dim=-1", dim)
    if dim == "dim=1":
        text = text.replace("out * u.sigmoid()", "out * x.sigmoid()")
    state, _, forward = translate(text, SIZES, specialised=True, loops={"Toy": [FOUND]})
    assert "torch_selective_scan" in forward
    assert "softplus" not in forward
    assert "kept" not in forward
    x = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(_made(_written(state), SIZES)(x), _made(text, SIZES)(x))


@pytest.mark.parametrize("steps", ["steps.relu()", "nn.functional.softplus(steps) * 2"])
def test_steps_that_come_otherwise_get_the_inverse_of_the_softplus(
    steps: str, translate: Translate
) -> None:
    text = SELECTING.replace("nn.functional.softplus(steps)", f"({steps})")
    state, _, forward = translate(text, SIZES, specialised=True, loops={"Toy": [FOUND]})
    assert "expm1" in forward
    x = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(_made(_written(state), SIZES)(x), _made(text, SIZES)(x))

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


CORRECTING = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.factor = config.factor

    def forward(self, x):
        query, key = x.tanh(), nn.functional.normalize(x, dim=-1)
        value, g, beta = x[..., 1:], -x[..., 0].exp(), x[..., 1].sigmoid()
        query, key, value, g, beta = (
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
            g.transpose(1, 2), beta.transpose(1, 2),
        )
        state = torch.zeros(x.shape[0], x.shape[2], x.shape[3], x.shape[3] - 1)
        out = torch.zeros_like(value)
        for i in range(x.shape[1]):
            k = key[:, :, i].unsqueeze(-1)
            state = state * g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
            change = (value[:, :, i] - (state * k).sum(dim=-2)) * beta[:, :, i].unsqueeze(-1)
            state = state + k * change.unsqueeze(-2)
            out[:, :, i] = (state * query[:, :, i].unsqueeze(-1)).sum(dim=-2)
        return out.transpose(1, 2) * self.factor
"""


def test_a_delta_rule_gets_queries_as_the_loop_has_them(translate: Translate) -> None:
    config, arguments = {"factor": 0.7}, ["query", "key", "value", "g", "beta"]
    found = LoopParameters(
        op="torch_gated_delta_rule",
        arguments=arguments,
        turned=[*arguments, "out"],
        result="out",
        joined=None,
        method="forward",
        index=0,
    )
    state, _, forward = translate(CORRECTING, config, specialised=True, loops={"Toy": [found]})
    assert "torch_gated_delta_rule(" in forward
    assert "for i in" not in forward
    x = torch.randn(2, 7, 3, 5, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(_made(_written(state), config)(x), _made(CORRECTING, config)(x))

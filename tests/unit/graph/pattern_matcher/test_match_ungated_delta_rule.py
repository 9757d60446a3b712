"""A delta rule whose gate never closes is the one without a gate; one that does stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onboard.ops  # noqa: F401
from tests.support.graph.harness import transform, worst_error

KEY = "match_ungated_delta_rule"


class _Rule(nn.Module):
    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        beta = x[..., 0].sigmoid()
        return torch.ops.onboard.torch_gated_delta_rule(
            x, x.cos(), x.sin(), self.gate(beta), beta, 0.3, True
        )


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, sequence, 3, 4)}


@pytest.mark.parametrize(
    "gate",
    [
        torch.zeros_like,
        lambda beta: -torch.zeros(beta.shape, dtype=torch.float64).to(beta.dtype),
        lambda beta: beta.new_ones(()).log().expand(beta.shape),
        lambda beta: torch.full_like(beta, 1.0).log(),
    ],
)
def test_a_gate_of_ones_goes(gate: Callable[[Tensor], Tensor]) -> None:
    model = _Rule(gate)
    result = transform([KEY], model, _inputs(2, 5))
    assert result.matches[KEY] == result.count(torch.ops.onboard.torch_delta_rule) == 1
    assert worst_error(result, model, _inputs) < 1e-6


@pytest.mark.parametrize(
    "gate", [lambda beta: beta.log(), lambda beta: torch.full_like(beta, -0.1), torch.ones_like]
)
def test_another_gate_stays(gate: Callable[[Tensor], Tensor]) -> None:
    result = transform([KEY], _Rule(gate), _inputs(2, 5))
    assert result.matches[KEY] == result.count(torch.ops.onboard.torch_delta_rule) == 0

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.graph.harness import make_context, run_only, transform, worst_error

KEY = "match_swiglu_pattern"
CANONICAL = torch.ops.onboard.torch_swiglu_mlp
HIDDEN, INTERMEDIATE = 16, 24


class _MLP(nn.Module):
    def __init__(
        self, activation: Callable[[Tensor], Tensor], bias: bool, *, swapped: bool = False
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=bias)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=bias)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=bias)
        self.activation = activation
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.activation(self.gate(x)), self.up(x)
        return self.down(up * gate if self.swapped else gate * up)


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, sequence, HIDDEN)}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (F.silu, "silu"),
        (F.gelu, "gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_pytorch_tanh"),
    ],
)
def test_gated_blocks_become_one_op(
    activation: Callable[[Tensor], Tensor], name: str, bias: bool, swapped: bool
) -> None:
    module = _MLP(activation, bias, swapped=swapped)
    result = transform([KEY], module, _inputs(2, 5))

    assert result.matches[KEY] == 1
    [node] = [node for node in result.gm.graph.nodes if node.target is CANONICAL.default]
    assert node.args[-1] == name
    assert str(node.args[1].target) == "gate.weight"
    assert result.count(torch.ops.aten.linear) == 0
    assert worst_error(result, module, _inputs) < 1e-6


class _Observed(_MLP):
    def forward(self, x: Tensor) -> Tensor:
        product = self.activation(self.gate(x)) * self.up(x)
        return self.down(product) + product.sum()


class _TwoInputs(_MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x + 1))


@pytest.mark.parametrize(
    "module", [_Observed(F.silu, True), _TwoInputs(F.silu, True), _MLP(F.relu, True)]
)
def test_other_expressions_stay(module: nn.Module) -> None:
    result = transform([KEY], module, _inputs(2, 5))

    assert result.matches[KEY] == 0
    assert worst_error(result, module, _inputs) < 1e-6


def test_every_block_of_a_generated_model_is_matched(tmp_path) -> None:
    context = make_context(tmp_path, num_hidden_layers=3, mlp_bias=True)
    run_only(context, ["build_model", "export_to_gm", KEY])

    assert context.history[-1].num_matches == 3

"""What is computed from weights alone is computed once, unless that would take more room than it
saves.
"""

from __future__ import annotations

import torch
from torch import nn

import onboard.ops  # noqa: F401
from tests.support.graph.fusion import apply, exported, targets
from tests.support.graph.harness import rmse


class Decay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log, self.matrix = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay = -self.log.double().exp().float()
        grown = self.log[:, None] * self.log[None, :]
        return (x * decay) @ self.matrix.mT + x @ grown


def test_constants_are_folded() -> None:
    model = Decay()
    gm, _, _ = apply("cleanup_input_constraints", exported(model, 2, 3, 8, device="cpu"))
    gm, info, _ = apply("fold_constants", gm)
    assert info.num_matches == 1
    called = set(targets(gm))
    assert not {"exp.default", "neg.default"} & called
    # A view is free
    assert any("transpose" in target or "mT" in target or "permute" in target for target in called)
    assert sum(target.startswith("mul") for target in targets(gm)) == 2  # [8, 8] from [8] stays
    x = torch.randn(2, 5, 8)
    assert rmse(gm(x), model(x)) <= 1e-6


def test_a_constant_may_be_named_as_what_modules_have() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1.0 + self.weight.double()).to(torch.float32)

    model = Cast()
    gm, _, _ = apply("cleanup_input_constraints", exported(model, 2, 3, 8, device="cpu"))
    folded = [node for node in gm.graph.nodes if node.name.startswith("to")][-1]
    folded.name = "to"
    gm, info, _ = apply("fold_constants", gm)
    assert info.num_matches == 1
    x = torch.randn(2, 5, 8)
    assert rmse(gm(x), model(x)) <= 1e-6


def test_nothing_is_folded_before_weights_are_loaded() -> None:
    _, info, _ = apply("fold_constants", exported(Decay(), 2, 3, 8))
    assert info.num_matches == 0

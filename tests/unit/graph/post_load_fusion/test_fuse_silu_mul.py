"""However gate and up are cut from one tensor, their gated product is one op; anything else is left
alone.
"""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onboard.errors import UsageError
from tests.support.graph.fusion import apply, exported, random_state, targets
from tests.support.graph.harness import rmse

CUTS = {
    "chunk": lambda y: y.chunk(2, -1),
    "chunk_positive_dim": lambda y: y.chunk(2, 2),
    "split": lambda y: y.split(6, -1),
    "split_sizes": lambda y: y.split([6, 6], -1),
    "slices": lambda y: (y[..., :6], y[..., 6:]),
    "narrow": lambda y: (y.narrow(-1, 0, 6), y.narrow(-1, 6, 6)),
}
NOT_HALVES = {
    "swapped": lambda y: (y[..., 6:], y[..., :6]),
    "overlapping": lambda y: (y[..., :6], y[..., 5:11]),
    "too_short": lambda y: (y[..., :5], y[..., 5:10]),
    "same": lambda y: (y[..., :6], y[..., :6]),
    "other_dim": lambda y: y.repeat(1, 2, 1).chunk(2, 1),
    "strided": lambda y: (y[..., ::2], y[..., 1::2]),
    "three": lambda y: torch.cat((y, y[..., :6]), -1).chunk(3, -1)[:2],
}


class Gated(nn.Module):
    def __init__(self, cut, *, up_first: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(8, 12)
        self.cut, self.up_first = cut, up_first

    def forward(self, x):
        gate, up = self.cut(self.gate_up(x))
        return up * F.silu(gate) if self.up_first else F.silu(gate) * up


def _apply(model, **fields):
    model.load_state_dict(random_state(model, random.randrange(10**6)))
    x = torch.randn(2, 3, 8)
    gm, info, context = apply("fuse_silu_mul", exported(model, 2, 3, 8, device="cpu"), **fields)
    assert rmse(gm(x), model(x).detach()) <= 1e-6
    return gm, info, context


@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_halves_are_fused(cut, up_first):
    gm, info, context = _apply(Gated(CUTS[cut], up_first=up_first), backend="torch")
    assert info.num_matches == 1
    assert targets(gm)[-1] == "onboard.torch_silu_and_mul.default"
    assert targets(gm).count("linear.default") == 1
    assert len(targets(gm)) == 2
    assert not context.facts


@pytest.mark.parametrize("cut", NOT_HALVES)
def test_what_is_not_two_halves_stays(cut):
    _, info, context = _apply(Gated(NOT_HALVES[cut]))
    assert info.num_matches == 0
    assert not context.facts


class Reused(Gated):
    def forward(self, x):
        gate, up = self.cut(self.gate_up(x))
        activated = F.silu(gate)
        return activated * up + activated


def test_an_activation_that_is_used_again_stays():
    assert _apply(Reused(CUTS["chunk"]))[1].num_matches == 0


def test_gemms_then_silu_mul():
    class Separate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(8, 6), nn.Linear(8, 6)

        def forward(self, x):
            return F.silu(self.gate(x)) * self.up(x)

    model = Separate()
    x = torch.randn(2, 3, 8)
    gm, _, _ = apply("fuse_gemms", exported(model, 2, 3, 8, device="cpu"))
    gm, info, _ = apply("fuse_silu_mul", gm, backend="torch")
    assert info.num_matches == 1
    assert targets(gm) == ["linear.default", "onboard.torch_silu_and_mul.default"]
    assert rmse(gm(x), model(x).detach()) <= 1e-6


@pytest.mark.parametrize("backend", ["flashinfer", "trtllm", "triton"])
def test_a_back_end_that_is_not_there_is_a_fact(backend):
    gm, _, context = _apply(Gated(CUTS["chunk"]), backend=backend)
    assert context.facts == [
        f"fuse_silu_mul: back end {backend} is not available here, torch is used"
    ]
    assert "onboard.torch_silu_and_mul.default" in targets(gm)


def test_an_unknown_back_end_is_refused():
    with pytest.raises((UsageError, ValueError), match="backend"):
        _apply(Gated(CUTS["chunk"]), backend="flash")

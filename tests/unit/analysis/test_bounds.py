"""What bounds or asks values is no op, however well it fits values of common size."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onboard.analysis.recognise.bounds.value_guards import guarded
from onboard.analysis.recognise.mixers import probe_gated_norm
from onboard.analysis.recognise.mixtures import probe_mixture
from onboard.analysis.recognise.numbered_experts import numbered_experts
from onboard.analysis.recognise.probe import probe_norm, probe_rope
from onboard.analysis.recognise.recorder import FunctionCall, ModuleCall
from tests.support import expert_loops

_BOUND = 900.0
"""Beyond what random numbers make."""


def _seeded() -> int:
    seed = random.randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)
    return seed


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda x: x * x.exp() + x.sum(), False),
        (lambda x: x.clamp(max=_BOUND), True),
        (lambda x: torch.where(x > _BOUND, 0.0, x), True),
        (lambda x: x / 2 if x.max() > _BOUND else x, True),
        (lambda x: x if bool(x.isfinite().all()) else x, True),
        (lambda x: torch.zeros(3).clamp(min=1) if x is None else x, False),
    ],
)
def test_bounds_are_seen_where_they_change_nothing(
    compute: Callable[[torch.Tensor], torch.Tensor], expected: bool
) -> None:
    assert guarded(lambda: compute(torch.randn(3)))[1] is expected


class _Norm(nn.Module):
    def __init__(self, bound: float | None) -> None:
        super().__init__()
        self.weight, self.eps, self.bound = nn.Parameter(torch.randn(24)), 1e-6, bound

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        x = x if gate is None else x * F.silu(gate)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (y if self.bound is None else y.clamp(-self.bound, self.bound))


@pytest.mark.parametrize("probe", [probe_norm, probe_gated_norm])
def test_a_norm_with_bounds_is_none(probe: Callable[[nn.Module], object]) -> None:
    _seeded()
    plain, bounded = _Norm(None), _Norm(24.0)  # the largest that it makes is the root of its width
    bounded.load_state_dict(plain.state_dict())
    x, gate = torch.randn(2, 7, 24)
    assert torch.equal(bounded(x, gate), plain(x, gate))
    assert probe(plain) is not None
    assert probe(bounded) is None


def test_a_rotation_that_bounds_what_it_turns_is_none() -> None:
    _seeded()
    q, k, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 5, 4)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    call = FunctionCall("turn", [q, k, cos, sin], [turn(q), turn(k)])
    assert probe_rope(call) is not None
    call.guarded = True
    assert probe_rope(call) is None


class _BoundedExpert(expert_loops.Expert):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x).clamp(max=_BOUND)) * self.w3(x))


class _BoundedSum(expert_loops.Masked):
    """What it sums is bounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                tokens = mask.any(dim=-1).nonzero().flatten()
                made = expert(flat[tokens]).clamp(-_BOUND, _BOUND)
                y.index_add_(0, tokens, made * weights[mask].view(-1, 1))
        return y.view(x.shape)


class _BoundedExperts(expert_loops.Masked):
    def make(self, hidden: int, inner: int) -> nn.Module:
        return _BoundedExpert(hidden, inner)


@pytest.mark.parametrize("kind", [expert_loops.Masked, _BoundedSum, _BoundedExperts])
def test_a_mixture_whose_experts_have_bounds_is_not_the_op(
    kind: type[expert_loops.Mixture],
) -> None:
    _seeded()
    module = kind().eval()
    x = torch.randn(2, 9, 8)
    with torch.no_grad():
        found = probe_mixture(module, [ModuleCall((x,), {}, module(x))])
    of_op = found is not None and found.parameters.get("activation") == "silu"
    assert of_op is (kind is expert_loops.Masked)


class _BoundedListed(expert_loops.Listed):
    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return super().forward(x, number).clamp(-_BOUND, _BOUND)


@pytest.mark.parametrize("kind", [expert_loops.Listed, _BoundedListed])
def test_numbered_experts_with_bounds_are_not_the_op(kind: type[expert_loops.Listed]) -> None:
    _seeded()
    assert (numbered_experts(kind(4, 8, 12)) is not None) is (kind is expert_loops.Listed)

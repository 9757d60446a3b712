"""Experts in a list are recognised by what the code around them computes, in whatever way it does."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from onboard.analysis.blocks.spec_mixtures import Mixture
from onboard.analysis.recognise.mixture_roles import choices
from onboard.analysis.recognise.mixtures import probe_mixture
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.recognise.stretches import statements_of
from onboard.analysis.source import find_method
from onboard.analysis.spec import unrun_in
from onboard.analysis.spec_blocks import make_block
from tests.support import expert_loops


def _called(module: nn.Module, seed: int) -> ModuleCall:
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return ModuleCall((x,), {}, module(x))


def _made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, int]:
    seed = random.randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)
    return kind().eval(), seed


@pytest.mark.parametrize(
    ("kind", "method", "names"),
    [
        (expert_loops.Masked, "forward", ("flat", "chosen", "weights", "y")),
        (expert_loops.OneHot, "forward", ("hidden_states", "selected", "weights", "final")),
        (expert_loops.Counted, "infer", ("x", "ids", "weight", "result")),
        (expert_loops.Flat, "infer", ("x", "flat", "weights", "cache")),
        (expert_loops.Biased, "forward", ("flat", "chosen", "weights", "y")),
        (expert_loops.PlainBiased, "forward", ("flat", "chosen", "weights", "y")),
    ],
)
def test_a_loop_over_experts_is_recognised(
    kind: type[nn.Module], method: str, names: tuple[str, ...]
) -> None:
    module, seed = _made(kind)
    found = probe_mixture(module, [_called(module, seed)])
    assert found is not None
    facts = found.parameters
    assert (facts["method"], facts["experts"]) == (method, "experts")
    assert tuple(facts[role] for role in ("x", "indices", "weights", "result")) == names
    assert facts["in_rows"] is (kind is not expert_loops.Flat)
    assert facts["biased"] is (kind in (expert_loops.Biased, expert_loops.PlainBiased))
    plain = kind is expert_loops.PlainBiased
    layers = ("fc_in", "fc_out", None) if plain else ("w1", "w2", "w3")
    assert (facts["gate"], facts["down"], facts["up"]) == layers
    assert facts["activation"] == ("gelu" if plain else "silu")
    method_of = find_method(kind, method)
    assert method_of is not None
    first = list(statements_of(method_of[1].body))[facts["begin"]]
    assert isinstance(first, ast.Assign | ast.AnnAssign)  # what the loop fills stands inside


def test_what_sorts_tokens_by_expert_is_of_the_mixture() -> None:
    module, seed = _made(expert_loops.SortedBeside)
    found = probe_mixture(module, [_called(module, seed)])
    assert found is not None
    facts = found.parameters
    roles = [facts[role] for role in ("x", "indices", "weights", "base", "result")]
    assert roles == ["flat", "chosen", "weights", "shared", "y"]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (5, 8)])
def test_a_tensor_without_a_share_of_the_choices_is_not_what_experts_read(
    shape: tuple[int, ...],
) -> None:
    variables = {"x": torch.zeros(shape), "indices": torch.zeros(3, 2, dtype=torch.long)}
    assert choices(variables, "x", "indices") == 0
    assert choices(variables | {"x": torch.zeros(3, 8)}, "x", "indices") == 2


@pytest.mark.parametrize("kind", [expert_loops.Crowded, expert_loops.Squared, expert_loops.Dropped])
def test_what_computes_something_else_is_not(kind: type[nn.Module]) -> None:
    module, seed = _made(kind)
    assert probe_mixture(module, [_called(module, seed)]) is None


@pytest.mark.parametrize(
    ("kind", "chosen", "renormalised"),
    [(expert_loops.Dispatched, 1, False), (expert_loops.Ranked, 2, True)],
)
def test_a_mixture_is_recognised_with_its_router(
    kind: type[nn.Module], chosen: int, renormalised: bool
) -> None:
    module, seed = _made(kind)
    found = probe_mixture(module, [_called(module, seed)])
    assert found is not None
    facts = found.parameters
    assert (facts["router"], facts["chosen"]) == ("gate", chosen)
    assert facts["renormalised"] is renormalised


def test_experts_that_differ_compute_every_token() -> None:
    module, seed = _made(expert_loops.Masked)
    experts = module.get_submodule("experts")
    assert isinstance(experts, nn.ModuleList)
    experts[1] = expert_loops.PlainExpert(8, 12)
    found = probe_mixture(module, [_called(module, seed)])
    assert found is not None
    assert found.parameters["layout"] == "any"


def test_experts_and_what_a_router_lies_in_run_in_their_mixture() -> None:
    module, seed = _made(expert_loops.Dispatched)
    found = probe_mixture(module, [_called(module, seed)])
    assert found is not None
    place = {"class_name": "Mix", "kind": "mixture", "path": "mlp", "source": "x.py:1"}
    for router, parts in (("gate", ["experts"]), ("route.gate", ["experts", "route"])):
        block = make_block(**place, parameters={**found.parameters, "router": router})
        assert isinstance(block, Mixture)
        assert unrun_in(block) == parts


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize(
    ("kind", "layout", "names", "turned"),
    [
        (expert_loops.Listed, "lists", ("gates", "downs", "ups"), []),
        (expert_loops.Stacked, "stacks", ("w1", "w2", "w3"), ["gate", "down", "up"]),
        (expert_loops.Flattened, "flat", ("w1", "w2", "w3"), ["down"]),
    ],
)
def test_experts_in_one_module_are_told_by_their_number(
    kind: type[nn.Module], layout: str, names: tuple[str, ...], turned: list[str], scale: float
) -> None:
    module, seed = _made(lambda: expert_loops.OneModule(kind, scale))
    found = probe_mixture(module, [_called(module, seed)])
    assert found is not None
    facts = found.parameters
    assert (facts["experts"], facts["layout"], facts["turned"]) == ("experts", layout, turned)
    assert tuple(facts[role] for role in ("gate", "down", "up")) == names
    assert facts["size"] == ("experts" if layout == "flat" else None)
    assert facts["scale"] == "scale"  # whatever it is in this model
    assert facts["activation"] == "silu"


def test_experts_in_one_module_that_compute_something_else_are_none() -> None:
    module, seed = _made(lambda: expert_loops.OneModule(expert_loops.Waving, 1.0))
    assert probe_mixture(module, [_called(module, seed)]) is None


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == 8
        return x + self.second(self.first(x[..., :4])).repeat(1, 1, 2)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_assert_their_inputs_are_no_experts() -> None:
    module, seed = _made(_Layers)
    assert probe_mixture(module, [_called(module, seed)]) is None

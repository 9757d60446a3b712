"""The weights of a mixture's experts become one tensor: through the plan before loading, by copies
after it.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import onboard.ops  # noqa: F401
from onboard.graph.weight_load.experts.expert_stacks import fold_experts
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from tests.support.graph.fusion import apply, context_for, exported, random_state, targets
from tests.support.graph.harness import rmse
from tests.unit.graph.weight_load.test_fuse_gemms import LiveBytes

EXPERTS, TOP, HIDDEN, INNER = 4, 2, 8, 6


class Mixture(nn.Module):
    """Experts with weights of their own, chosen by the signs of the input."""

    def __init__(self, *, gated: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList()
        for _ in range(EXPERTS):
            expert = nn.Module()
            expert.gate_proj, expert.up_proj = (
                nn.Linear(HIDDEN, INNER, bias=bias) for _ in range(2)
            )
            expert.down_proj = nn.Linear(INNER, HIDDEN, bias=bias)
            self.experts.append(expert)
        self.gated, self.bias = gated, bias

    def lists(self, kind: str) -> list[list[torch.Tensor]]:
        names = ("gate_proj", "down_proj", "up_proj")[: 3 if self.gated else 2]
        found = [
            [getattr(getattr(expert, name), kind) for expert in self.experts] for name in names
        ]
        return found if self.gated else [*found, []]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(
            x, self.lists("weight"), self.gated, self.lists("bias") if self.bias else [None] * 3
        )


class Stacked(nn.Module):
    """Experts as some checkpoints have them: transposed, gate and up alternating, two parameters in
    all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both.transpose(1, 2)
        lists = [list(part.unbind()) for part in (both[:, ::2], self.down, both[:, 1::2])]
        bias = [list(self.bias[:, ::2].unbind()), None, list(self.bias[:, 1::2].unbind())]
        return run(x, lists, True, bias)


def run(x: torch.Tensor, lists: list, gated: bool, biases: list) -> torch.Tensor:
    rows = x.tanh().reshape(-1, HIDDEN)
    weights, chosen = rows[:, :EXPERTS].softmax(-1).topk(TOP)
    rest = (0.7, 1.2, 1.0) if biases[0] is not None else ()
    return torch.ops.onboard.torch_moe(
        rows, chosen, weights, *lists, gated, "silu", *biases, *rest
    ).view(x.shape)


CASES = {
    "gated": lambda: Mixture(),
    "biases": lambda: Mixture(bias=True),
    "not gated": lambda: Mixture(gated=False),
    "not gated, biases": lambda: Mixture(gated=False, bias=True),
}


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_experts_are_stacked(tmp_path, case, loaded):
    model = CASES[case]()
    state = random_state(model, random.randrange(10**6))
    model.load_state_dict(state)
    gm = exported(model, 2, 3, HIDDEN, device="cpu" if loaded else "meta")
    gm, info, _ = apply("fuse_moe" if loaded else "stack_expert_weights", gm)
    assert info.num_matches == 1
    if not loaded:
        gm, _, _ = apply(
            "load_weights", gm, context_for(tmp_path, {name: state[name] for name in _read(model)})
        )
    x = torch.randn(3, 5, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6
    names = dict(gm.named_parameters())
    assert set(names) == {"experts.w3_w1_stacked_weight", "experts.w2_stacked_weight"} | (
        {"experts.w3_w1_stacked_bias", "experts.w2_stacked_bias"} if model.bias else set()
    )
    up_first = ("up_proj", "gate_proj") if model.gated else ("gate_proj",)
    expected = [
        torch.cat([state[f"experts.{index}.{part}.weight"] for part in up_first])
        for index in range(EXPERTS)
    ]
    assert torch.equal(names["experts.w3_w1_stacked_weight"], torch.stack(expected))


def _read(model: Mixture) -> list[str]:
    return [name for name, _ in model.named_parameters() if model.gated or "up_proj" not in name]


def test_slices_of_stacks_are_folded_once_they_are_loaded():
    model = Stacked()
    gm = exported(model, 2, 3, HIDDEN, device="cpu")
    gm, info, context = apply("stack_expert_weights", gm)
    assert info.num_matches == 0
    gm, info, context = apply("fuse_moe", gm)
    assert info.num_matches == 1
    assert not info.is_clean  # the slices are still there, without users
    assert context.facts == []
    x = torch.randn(2, 4, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6
    assert {name.split(".")[-1] for name, _ in gm.named_parameters()} == {
        "w3_w1_stacked_weight", "w2_stacked_weight", "w3_w1_stacked_bias"
    }  # fmt: skip
    assert not any("unbind" in target for target in targets(gm))


class Shared(Mixture):
    """One expert's weight is read elsewhere, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.functional.linear(x, self.experts[0].gate_proj.weight).sum()


def test_weights_that_are_read_elsewhere_are_kept():
    model = Shared()
    gm = exported(model, 2, 3, HIDDEN, device="cpu")
    gm, info, _ = apply("stack_expert_weights", gm)
    assert info.num_matches == 0
    gm, info, _ = apply("fuse_moe", gm)
    x = torch.randn(2, 4, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6
    assert "experts.0.gate_proj.weight" in dict(gm.named_parameters())


def test_computed_weights_are_a_fact():
    class Computed(Mixture):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, *rest = self.lists("weight")
            return run(x, [[weight * x.mean() for weight in first], *rest], True, [None] * 3)

    model = Computed()
    gm, info, context = apply("fuse_moe", exported(model, 2, 3, HIDDEN, device="cpu"))
    assert info.num_matches == 0
    assert context.facts == [
        "fuse_moe: 1 mixtures of experts stay as they are, their weights cannot be stacked"
    ]
    x = torch.randn(2, 4, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6


def test_loading_stacked_weights_peaks_at_one_tensor_above_the_model(tmp_path, monkeypatch):
    """The checkpoint's tensor counts in full, although on the CPU it is only mapped."""
    gm, _, _ = apply("stack_expert_weights", exported(Mixture(), 2, 3, HIDDEN))
    context = context_for(tmp_path, random_state(Mixture(), 0))
    live, read = LiveBytes(), Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda *args: live.track(read(*args)))
    with live:
        apply("load_weights", gm, context, shapes=False)
    final = sum(parameter.nbytes for parameter in gm.parameters())
    assert final == EXPERTS * 3 * HIDDEN * INNER * 4
    assert final <= live.peak <= final + HIDDEN * INNER * 4 + 64


class BesideOthers(Mixture):
    """A router and a gate read what the mixture reads."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.gate = (
            nn.Linear(HIDDEN, EXPERTS, bias=False),
            nn.Linear(HIDDEN, 1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, HIDDEN)
        weights, chosen = self.router(rows).softmax(-1).topk(TOP)
        mixed = torch.ops.onboard.torch_moe(rows, chosen, weights, *self.lists("weight"))
        return (mixed * self.gate(rows).sigmoid()).view(x.shape)


def test_a_mixture_does_not_keep_linears_apart():
    model = BesideOthers()
    gm, info, _ = apply("fuse_gemms", exported(model, 2, 3, HIDDEN, device="cpu"))
    assert info.num_matches == 1
    assert targets(gm).count("linear.default") == 1
    x = torch.randn(2, 4, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6


def test_a_gated_mixture_with_biases_of_its_gates_alone_stays_as_it_is():
    class HalfBiased(Mixture):
        def lists(self, kind: str) -> list[list[torch.Tensor]]:
            found = super().lists(kind)
            return found if kind == "weight" else [*found[:2], None]

    gm, info, _ = apply(
        "stack_expert_weights", exported(HalfBiased(bias=True), 2, 3, HIDDEN, device="cpu")
    )
    assert info.num_matches == 0


def test_what_was_folded_is_counted():
    assert fold_experts(exported(Stacked(), 2, 3, HIDDEN, device="cpu")) == 1


class TwoOfOneList(Mixture):
    """Two mixtures whose experts are in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.experts.extend(Mixture().experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in (slice(EXPERTS), slice(EXPERTS, None)):
            x = run(x, [part[half] for part in self.lists("weight")], True, [None] * 3)
        return x


class Listed(nn.Module):
    """A list of parameters for each kind of weight."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"gate": (INNER, HIDDEN), "down": (HIDDEN, INNER), "up": (INNER, HIDDEN)}
        self.lists = nn.ModuleDict(
            {
                name: nn.ParameterList([torch.randn(shape) for _ in range(EXPERTS)])
                for name, shape in shapes.items()
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(x, [list(self.lists[name]) for name in ("gate", "down", "up")], True, [None] * 3)


def test_a_stack_is_named_under_the_path_that_its_parts_share():
    gm, info, _ = apply("stack_expert_weights", exported(Listed(), 2, 3, HIDDEN, device="meta"))
    assert info.num_matches == 1
    assert set(dict(gm.named_parameters())) == {
        "lists.w3_w1_stacked_weight",
        "lists.down.w2_stacked_weight",
    }


def test_stacks_of_one_list_have_names_of_their_own():
    model = TwoOfOneList()
    gm, info, _ = apply("fuse_moe", exported(model, 2, 3, HIDDEN, device="cpu"))
    assert info.num_matches == 2
    assert len(dict(gm.named_parameters())) == 4
    x = torch.randn(2, 4, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6

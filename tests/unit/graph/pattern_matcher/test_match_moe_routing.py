"""Routers are recognised by what they do: written in several ways, and not when they do something
else.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import onboard.ops  # noqa: F401
from onboard.graph.fx import ancestors, arguments, nodes_of, placeholders
from onboard.graph.pattern_matcher.moe_routing import _BIAS_SCALES, _routing, _trial, _width
from onboard.graph.weight_load.parameters import unread_names
from tests.support.graph.fusion import apply, exported
from tests.support.graph.harness import rmse

EXPERTS, TOP, HIDDEN = 12, 3, 8


def softmax_first(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(TOP)
    return experts, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)


def softmax_only(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1).topk(TOP)
    return experts, weights * 1.5


def softmax_last(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    best, experts = logits.topk(TOP)
    return experts, best.softmax(-1).type_as(logits)


def biased(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    experts = (scores + bias).topk(TOP)[1]
    weights = scores.gather(-1, experts)
    return experts, weights / (weights.sum(-1, keepdim=True) + 0.1)


def grouped(logits: Tensor, bias: Tensor, best: int = 2) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    by_group = (scores + bias).view(-1, 4, EXPERTS // 4)
    groups = by_group.topk(best, -1)[0].sum(-1).topk(2, -1)[1]
    kept = torch.zeros_like(by_group[..., 0]).scatter(1, groups, 1).bool()
    experts = (
        by_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(-1, EXPERTS).topk(TOP)[1]
    )
    return experts, scores.gather(1, experts) * 2.5


def grouped_by_the_best(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return grouped(logits, bias, 1)


def weights_of_the_rest(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    experts = logits.topk(TOP)[1]
    return experts, (1 - logits.sigmoid()).gather(-1, experts)


def squared(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1).topk(TOP)
    return experts, weights.square()


def biased_weights(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = (logits.sigmoid() + bias).topk(TOP)
    return experts, weights


class Model(nn.Module):
    def __init__(self, route, experts: int = EXPERTS) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.register_buffer("bias", torch.randn(experts) * 0.1)
        self.up = nn.ParameterList(torch.randn(6, HIDDEN) for _ in range(experts))
        self.down = nn.ParameterList(torch.randn(HIDDEN, 6) for _ in range(experts))
        self.route = route

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        experts, weights = self.route(self.router(rows), self.bias)
        mixed = torch.ops.onboard.torch_moe(
            rows, experts, weights, list(self.up), list(self.down), [], False
        )
        return mixed.view(x.shape)


@pytest.mark.parametrize(
    "route",
    [softmax_first, softmax_only, softmax_last, biased, grouped, grouped_by_the_best],
    ids=lambda r: r.__name__,
)
def test_routers_become_one_op(route):
    model = Model(route)
    gm, info, context = apply(
        "match_moe_routing_pattern", exported(model, 2, 3, HIDDEN, device="cpu")
    )
    assert info.num_matches == 1
    assert context.facts == []
    [mixture] = nodes_of(gm, torch.ops.onboard.torch_moe)
    names = [str(node.target) for node in ancestors([mixture])]
    assert not any(
        name in target for target in names for name in ("topk", "softmax", "sigmoid", "gather")
    )
    x = torch.randn(3, 7, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6


@pytest.mark.parametrize("chosen", [TOP, EXPERTS])
def test_a_bias_that_decides_nothing_is_left_in_the_checkpoint(chosen):
    """Where all experts are chosen, which of them come first is all that it says."""

    def route(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        experts = (scores + bias).topk(chosen)[1]
        return experts, scores.gather(-1, experts)

    model = Model(route)
    del model.bias
    model.bias = nn.Parameter(torch.randn(EXPERTS) * 0.1, requires_grad=False)
    gm, info, _ = apply("match_moe_routing_pattern", exported(model, 2, 3, HIDDEN, device="cpu"))
    assert info.num_matches == 1
    assert (unread_names(gm) == {"bias"}) == (chosen == EXPERTS)
    assert ("bias" in dict(gm.named_parameters())) == (chosen < EXPERTS)
    x = torch.randn(3, 7, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6


@pytest.mark.parametrize(
    "route", [weights_of_the_rest, squared, biased_weights], ids=lambda r: r.__name__
)
def test_other_routers_stay(route):
    model = Model(route)
    gm, info, context = apply(
        "match_moe_routing_pattern", exported(model, 2, 3, HIDDEN, device="cpu")
    )
    assert info.num_matches == 0
    assert context.facts == [
        "match_moe_routing_pattern: 1 routers of mixtures of experts stay as they are"
    ]
    x = torch.randn(3, 7, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6


@pytest.mark.parametrize("best", [1, 2])
def test_how_groups_are_chosen_is_told_from_scores_and_biases_alike(best):
    """A random bias that is far larger than scores would choose one group for all tokens, however
    it is counted.
    """
    for _ in range(8):
        gm = exported(Model(partial(grouped, best=best)), 2, 3, HIDDEN, device="cpu")
        gm, _, _ = apply("match_moe_routing_pattern", gm)
        [router] = nodes_of(gm, torch.ops.onboard.torch_moe_router)
        assert arguments(router)["group_top"] == best


def test_a_bias_that_happens_to_be_zero_still_counts():
    model = Model(biased)
    model.bias.zero_()
    gm, info, _ = apply("match_moe_routing_pattern", exported(model, 2, 3, HIDDEN, device="cpu"))
    assert info.num_matches == 1
    gm.get_buffer("bias").copy_(torch.randn(EXPERTS))
    model.bias.copy_(gm.get_buffer("bias"))
    x = torch.randn(3, 7, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6


def two_groups(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    by_group = (scores + bias).view(-1, 2, 2)
    group = by_group.sum(-1).argmax(-1, keepdim=True)
    kept = torch.zeros_like(by_group[..., 0]).scatter(1, group, 1).bool()
    experts = by_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(-1, 4).topk(2)[1]
    return experts, scores.gather(-1, experts)


def test_a_bias_counts_also_where_few_choices_depend_on_it():
    """One random bias is often nearly the same for both groups, and then changes no choice."""
    gm = exported(Model(two_groups, 4), 2, 3, HIDDEN, device="cpu")
    routing = _routing(gm, nodes_of(gm, torch.ops.onboard.torch_moe)[0])
    for seed in torch.randint(2**31, (150,)).tolist():
        generator = torch.Generator().manual_seed(seed)
        trials = [_trial(gm, routing, scale, generator) for scale in _BIAS_SCALES]
        options = {"top_k": 2, "normalize": False, "scoring": "sigmoid", "groups": 2}
        options |= {"top_groups": 1, "group_top": 2}
        assert all(trial.fits(True, options) for trial in trials)
        assert not all(trial.fits(False, options) for trial in trials)


def test_the_width_of_a_tensor_is_known_where_it_is_a_fixed_number():
    gm = exported(Model(softmax_first), 2, 3, HIDDEN, device="cpu")
    [x] = placeholders(gm)
    assert [_width(x, dim) for dim in (-1, -2, -3, -4)] == [HIDDEN, None, None, None]
    assert _width(gm.graph.get_attr("bias"), -1) is None

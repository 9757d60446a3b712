"""`torch_moe` against a loop over tokens in float64, and against transformers' own experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import onboard.ops  # noqa: F401
from onboard.errors import UsageError
from tests.support.ops.naive import relative_error

ops = torch.ops.onboard
TOKENS, EXPERTS, TOP, HIDDEN, INTERMEDIATE = 7, 5, 2, 8, 12


def _routing(experts: int = EXPERTS) -> tuple[Tensor, Tensor]:
    selected = torch.stack([torch.randperm(experts)[:TOP] for _ in range(TOKENS)])
    return selected, torch.rand(TOKENS, TOP)


def _weights(rows: int, columns: int) -> list[Tensor]:
    return [torch.randn(rows, columns) / columns**0.5 for _ in range(EXPERTS)]


def _naive(
    x: Tensor,
    selected: Tensor,
    routing: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    w3: list[Tensor],
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for slot in range(TOP):
            expert = int(selected[token, slot])
            if not 0 <= expert < EXPERTS:
                continue
            gate = w1[expert].double() @ x[token].double()
            hidden = (
                gate
                / (1 + torch.exp(-gate))
                * (w3[expert].double() @ x[token].double() if w3 else 1.0)
            )
            out[token] += routing[token, slot].double() * (w2[expert].double() @ hidden)
    return out


@pytest.mark.parametrize("gated", [True, False])
def test_each_token_gets_the_weighted_sum_of_its_experts(gated: bool) -> None:
    x, (selected, routing) = torch.randn(TOKENS, HIDDEN), _routing()
    w1, w2 = _weights(INTERMEDIATE, HIDDEN), _weights(HIDDEN, INTERMEDIATE)
    w3 = _weights(INTERMEDIATE, HIDDEN) if gated else []
    actual = ops.torch_moe(x, selected, routing, w1, w2, w3, gated)
    assert relative_error(actual, _naive(x, selected, routing, w1, w2, w3)) < 1e-6


def test_routing_weights_may_have_more_digits_than_the_tokens() -> None:
    (selected, routing), half = _routing(), torch.bfloat16
    x, shapes = (
        torch.randn(TOKENS, HIDDEN).to(half),
        ((INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)),
    )
    w1, w2, w3 = ([weight.to(half) for weight in _weights(*shapes[kind])] for kind in (0, 1, 0))
    actual = ops.torch_moe(x, selected, routing, w1, w2, w3)
    assert actual.dtype == half
    assert relative_error(actual, _naive(x, selected, routing, w1, w2, w3)) < 2e-2


def test_an_expert_of_another_rank_is_skipped() -> None:
    x, (selected, routing) = torch.randn(TOKENS, HIDDEN), _routing()
    w1, w2, w3 = (
        _weights(INTERMEDIATE, HIDDEN),
        _weights(HIDDEN, INTERMEDIATE),
        _weights(INTERMEDIATE, HIDDEN),
    )
    selected[0], selected[1, 0], selected[2, 1] = -1, EXPERTS, 10**6
    actual = ops.torch_moe(x, selected, routing, w1, w2, w3)
    assert actual[0].abs().max() == 0
    assert relative_error(actual, _naive(x, selected, routing, w1, w2, w3)) < 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2"])
def test_it_is_what_the_experts_of_hugging_face_do(activation: str) -> None:
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        hidden_act=activation,
    )
    config._experts_implementation = "eager"
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, (selected, routing) = torch.randn(TOKENS, HIDDEN), _routing()
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    lists = [list(weight.unbind()) for weight in (gate, experts.down_proj, up)]
    shaped = (
        x.view(1, TOKENS, HIDDEN),
        selected.view(1, TOKENS, TOP),
        routing.view(1, TOKENS, TOP),
    )
    actual = ops.torch_moe(*shaped, *lists, True, activation)
    assert relative_error(actual[0], experts(x, selected, routing)) < 1e-6


def test_biases_bounds_and_the_offset_are_those_of_hugging_face() -> None:
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS
    )
    config.swiglu_limit, config.swiglu_alpha = 0.8, 1.3
    config._experts_implementation = "eager"
    experts = GptOssExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, (selected, routing) = torch.randn(TOKENS, HIDDEN), _routing()
    both, bias = experts.gate_up_proj.transpose(1, 2), experts.gate_up_proj_bias
    w1, w2, w3 = both[:, ::2], experts.down_proj.transpose(1, 2), both[:, 1::2]
    lists = [
        list(item.unbind())
        for item in (w1, w2, w3, bias[:, ::2], experts.down_proj_bias, bias[:, 1::2])
    ]
    actual = ops.torch_moe(
        x, selected, routing, *lists[:3], True, "silu", *lists[3:], 0.8, 1.3, 1.0
    )
    assert relative_error(actual, experts(x, selected, routing)) < 1e-6


def test_gate_and_up_may_have_caps() -> None:
    x, (selected, routing) = torch.randn(TOKENS, HIDDEN), _routing()
    w1, w2, w3 = (
        _weights(INTERMEDIATE, HIDDEN),
        _weights(HIDDEN, INTERMEDIATE),
        _weights(INTERMEDIATE, HIDDEN),
    )
    actual = ops.torch_moe(x, selected, routing, w1, w2, w3, gate_cap=0.7, up_cap=0.4)
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in [(i, j) for i in range(TOKENS) for j in range(TOP)]:
        expert = int(selected[token, slot])
        gate, up = (weight[expert].double() @ x[token].double() for weight in (w1, w3))
        hidden = 0.7 * torch.tanh(gate / 0.7) / (1 + torch.exp(-gate)) * 0.4 * torch.tanh(up / 0.4)
        expected[token] += routing[token, slot].double() * (w2[expert].double() @ hidden)
    assert relative_error(actual, expected) < 1e-6
    stacked = (torch.stack([torch.cat(pair) for pair in zip(w3, w1, strict=True)]), torch.stack(w2))
    fused = ops.torch_moe_fused(x, selected, routing, *stacked, gate_cap=0.7, up_cap=0.4)
    assert relative_error(fused, expected) < 1e-6


def test_registration_is_sound() -> None:
    x, (selected, routing) = torch.randn(TOKENS, HIDDEN), _routing()
    w1, w2, w3 = (
        _weights(INTERMEDIATE, HIDDEN),
        _weights(HIDDEN, INTERMEDIATE),
        _weights(INTERMEDIATE, HIDDEN),
    )
    torch.library.opcheck(ops.torch_moe.default, (x, selected, routing, w1, w2, w3))
    torch.library.opcheck(
        ops.torch_moe.default, (x.view(1, TOKENS, HIDDEN), selected, routing, w1, w2, [], False)
    )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("groups", "top_groups", "group_top"), [(1, 1, 1), (4, 2, 1), (4, 2, 2), (2, 1, 3)]
)
def test_tokens_go_to_the_best_experts_of_the_best_groups(
    scoring: str, groups: int, top_groups: int, group_top: int
) -> None:
    logits, bias = torch.randn(37, 12), torch.randn(12)
    weights, experts = ops.torch_moe_router(
        logits, 3, True, scoring, bias, 2.5, 1e-20, groups, top_groups, group_top
    )
    size = 12 // groups
    for row, ours, ids in zip(logits.double(), weights, experts.tolist(), strict=True):
        scores = row.softmax(-1) if scoring == "softmax" else row.sigmoid()
        wanted = (scores + bias.double()).tolist()
        parts = [sorted(wanted[start : start + size], reverse=True) for start in range(0, 12, size)]
        best = sorted(range(groups), key=lambda group: -sum(parts[group][:group_top]))[:top_groups]
        allowed = [expert for expert in range(12) if expert // size in best]
        assert ids == sorted(allowed, key=lambda expert: -wanted[expert])[:3]
        expected = scores[ids] / scores[ids].sum() * 2.5
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-7)


def test_an_unknown_scoring_is_refused() -> None:
    with pytest.raises(UsageError, match="no scoring 'sigmod'"):
        ops.torch_moe_router(torch.randn(2, 4), 1, True, "sigmod")

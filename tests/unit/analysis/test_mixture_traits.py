"""Attention and mixtures are named as they are, by what configs and probes say."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, PretrainedConfig

from onboard.analysis.layer_modules import layer_kinds, with_modules
from onboard.analysis.mixture_traits import active_parameters, mixture
from onboard.analysis.recognise.recorder import Recording, record
from onboard.analysis.spec import LayerKind, Trait
from onboard.analysis.traits import _attention
from tests.unit.spec_samples import sample_block

EXPERTS = [sample_block("X", "experts")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, {"experts": 8, "experts_per_token": 2}),
        (
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1},
            {"experts": 256, "experts_per_token": 8, "shared_experts": 1},
        ),
        (
            {"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632},
            {"experts": 60, "experts_per_token": 4, "shared_experts": 1},
        ),
        ({"moe_num_experts": [64, 32], "moe_k": 6, "moe_num_shared_experts": 2}, {
            "experts": 64, "experts_per_token": 6, "shared_experts": 2,
        }),
        ({"num_experts": 4, "n_shared_experts": 0, "experts_per_token": None}, {"experts": 4}),
    ],
)  # fmt: skip
def test_a_mixture_says_how_many_experts_it_has(
    fields: dict[str, Any], expected: dict[str, int]
) -> None:
    config = PretrainedConfig(**fields)
    assert {name: trait.value for name, trait in mixture(config, EXPERTS).items()} == expected
    assert mixture(config, []) == {}, "a field alone makes no mixture"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_key_value_heads": 8}, "mha"),
        ({"num_key_value_heads": 2}, "gqa"),
        ({"num_key_value_heads": 1}, "mqa"),
        ({"num_key_value_heads": 8, "kv_lora_rank": 512}, "mla"),
    ],
)
def test_attention_is_named_by_what_its_heads_share(fields: dict[str, Any], expected: str) -> None:
    config = PretrainedConfig(num_attention_heads=8, **fields)
    call = SimpleNamespace(window=None, keywords={"softcap": None, "s_aux": None})
    recording: Any = SimpleNamespace(attention=[call])
    assert _attention(config, config, recording)["attention"].value == expected


@pytest.fixture(scope="module")
def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(random.randrange(2**31))
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=5, num_experts_per_tok=2, vocab_size=30, head_dim=8,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def _experts(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def test_active_parameters_are_those_that_a_tokens_gradient_reaches(
    mixtral: MixtralForCausalLM,
) -> None:
    mixtral.zero_grad()
    mixtral(torch.tensor([[7]]), use_cache=False).logits.square().sum().backward()
    idle = 0
    for parameter in (
        parameter for module in _experts(mixtral) for parameter in module.parameters()
    ):
        assert parameter.grad is not None
        idle += sum(
            weight.numel()
            for weight, grad in zip(parameter, parameter.grad, strict=True)
            if not grad.any()
        )
    assert idle
    total = sum(parameter.numel() for parameter in mixtral.parameters())
    [name] = {type(module).__name__ for module in _experts(mixtral)}
    blocks = [sample_block(name, "experts")]
    assert active_parameters(mixtral, blocks, mixture(mixtral.config, blocks)) == total - idle
    assert active_parameters(mixtral, [], {}) is None


def test_layers_of_a_mixtures_class_may_have_no_experts() -> None:
    """As where a class makes a plain MLP in every second layer."""

    class Mixed(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            if count:
                self.experts = nn.ModuleList(nn.Linear(2, 3, bias=False) for _ in range(count))

    mixture_block = sample_block(
        "Mixed",
        "mixture",
        experts="experts",
        gate="w1",
        down="w2",
        up="w3",
        activation="act",
        method="forward",
        begin=0,
        count=1,
        result="y",
        x="x",
        indices="i",
        weights="w",
        in_rows=True,
    )
    traits = {
        name: Trait(value=n, evidence="") for name, n in (("experts", 4), ("experts_per_token", 1))
    }
    model = nn.Sequential(Mixed(0), Mixed(4))
    assert active_parameters(model, [mixture_block], traits) == 6


def test_a_kind_of_layer_has_its_modules_in_the_order_in_which_they_run(
    mixtral: MixtralForCausalLM,
) -> None:
    recording = record(
        mixtral, {"input_ids": torch.tensor([[7, 3]]), "position_ids": torch.tensor([[0, 1]])}
    )
    names = ("MixtralAttention", "MixtralRMSNorm", "MixtralSparseMoeBlock")
    blocks = [sample_block(name, "other") for name in names]
    kind = with_modules(
        LayerKind(name="a", layers=[1], path="model.layers.1"), mixtral, recording, blocks
    )
    assert list(kind.modules) == ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp"]
    assert kind.modules["mlp"] == "MixtralSparseMoeBlock"


def test_a_layer_that_runs_stands_for_its_kind(mixtral: MixtralForCausalLM) -> None:
    """Layers of cross-attention are left out of a text without an image."""
    seen = Recording(torch.empty(0), modules={"model.layers.1": []})
    (kind,) = layer_kinds(mixtral, mixtral, seen, set(), [])
    assert (kind.path, kind.layers) == ("model.layers.1", [0, 1])
    (kind,) = layer_kinds(mixtral, mixtral, Recording(torch.empty(0)), set(), [])
    assert kind.path == "model.layers.0"

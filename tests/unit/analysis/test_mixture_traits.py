"""Attention and mixtures are named as they are, by what configs and probes say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PretrainedConfig

from onboard.analysis.mixture_traits import mixture
from onboard.analysis.spec import Block
from onboard.analysis.traits import _attention

EXPERTS = [Block(class_name="X", kind="experts", path="", source="x.py:1")]


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
def test_a_mixture_says_how_many_experts_it_has(fields: dict[str, Any], expected: dict[str, int]) -> None:
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

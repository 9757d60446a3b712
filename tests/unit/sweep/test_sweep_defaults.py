from __future__ import annotations

import pytest
from transformers import AutoConfig

from onboard.workflow.sweep.inputs.checkpoint_defaults import complete


def _completed(model_type: str) -> dict[str, object]:
    return dict(complete(AutoConfig.for_model(model_type)).to_dict())


def test_a_config_that_lacks_nothing_stays_as_it_is() -> None:
    config = AutoConfig.for_model("llama")
    assert complete(config) is config


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "ministral"])
def test_heads_divide_the_width_where_they_have_no_size(model_type: str) -> None:
    fields = _completed(model_type)
    assert fields["head_dim"] == fields["hidden_size"] // fields["num_attention_heads"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("model_type", "chosen", "experts"),
    [
        ("dots1", "num_experts_per_tok", "n_routed_experts"),
        ("hunyuan_v1_moe", "moe_topk", "num_experts"),
    ],
)
def test_a_mixture_has_experts_to_choose_from(model_type: str, chosen: str, experts: str) -> None:
    fields = _completed(model_type)
    assert 1 < fields[chosen] < fields[experts]  # type: ignore[operator]


@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe"])
def test_convolutions_and_attention_are_both_there(model_type: str) -> None:
    assert set(_completed(model_type)["layer_types"]) == {"conv", "full_attention"}  # type: ignore[call-overload]


def test_a_decoder_says_that_it_is_one() -> None:
    assert _completed("bert")["is_decoder"] is True


def test_windows_turn_and_whole_attention_does_not_where_no_rope_is_given() -> None:
    config = complete(AutoConfig.for_model("cohere_compass_text"))
    assert config.rope_parameters["full_attention"] is None
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_what_lies_in_configs_inside_is_completed() -> None:
    config = complete(AutoConfig.for_model("dbrx"))
    assert config.attn_config.rope_theta == 10000.0
    assert config.attn_config.clip_qkv == 8


@pytest.mark.parametrize(
    ("model_type", "field", "value"), [("xlm", "causal", True), ("xlnet", "attn_type", "bi")]
)
def test_a_decoder_sees_no_later_token(model_type: str, field: str, value: object) -> None:
    assert _completed(model_type)[field] == value

from __future__ import annotations

import pytest
import torch
from torch import nn

from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.random_weights import randomize
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.analysis.tiny.tiny_prompts import prompts
from onboard.analysis.tiny.tiny_sizes import ORIGINAL_POSITIONS, WINDOW, rotated_dim, shrink_rope
from tests.support.families import VARIANTS, config_dict


def test_every_kind_of_layer_is_kept() -> None:
    config = tiny_config(load_config({"model_type": "gemma3_text", "num_hidden_layers": 26}))
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.num_hidden_layers == len(config.layer_types) == 2
    assert config.sliding_window == WINDOW


def test_tokens_that_are_as_many_as_layers_are_none_of_theirs() -> None:
    config = load_config({"model_type": "llama", "num_hidden_layers": 3, "eos_token_id": [2, 3, 4]})
    assert tiny_config(config).num_hidden_layers == 2


def test_layers_without_rope_are_kept() -> None:
    assert sorted(tiny_config(load_config({"model_type": "smollm3"})).no_rope_layers) == [0, 1]


@pytest.mark.parametrize(("kv_heads", "expected"), [(32, 4), (8, 2), (1, 1)])
def test_the_ratio_of_heads_keeps_its_kind(kv_heads: int, expected: int) -> None:
    config = load_config({"model_type": "llama", "num_key_value_heads": kv_heads})
    assert tiny_config(config).num_key_value_heads == expected


def test_a_head_size_that_does_not_divide_the_width_stays_one() -> None:
    config = tiny_config(
        load_config({"model_type": "qwen3", "head_dim": 128, "num_attention_heads": 16})
    )
    assert config.head_dim * config.num_attention_heads != config.hidden_size


def test_longrope_factors_are_as_many_as_channels() -> None:
    config = tiny_config(load_config(config_dict("phi3", "4-mini")))
    rotary = int(config.hidden_size // config.num_attention_heads * 0.75)
    assert len(config.rope_parameters["short_factor"]) == rotary // 2
    assert config.rope_parameters["original_max_position_embeddings"] == ORIGINAL_POSITIONS


@pytest.mark.parametrize(
    ("small", "expected"), [({"qk_rope_head_dim": 8, "head_dim": 20}, 4), ({"head_dim": 20}, 10)]
)
def test_latent_attention_turns_the_channels_that_it_keeps_for_that(
    small: dict[str, int], expected: int
) -> None:
    rope = shrink_rope({"rope_scaling": {"short_factor": [1.0] * 16}}, rotated_dim(small))
    assert len(rope["rope_scaling"]["short_factor"]) == expected


@pytest.mark.parametrize("family", VARIANTS)
def test_every_parameter_is_random(family: str) -> None:
    model = build_tiny(load_config(config_dict(family)))
    for name, parameter in model.named_parameters():
        assert parameter.unique().numel() > parameter.numel() // 2, name
        assert float(parameter.std()) > 0.05, name
    assert not model.training


def test_a_parameter_without_items_stays_empty() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, 0))
    model.bias = nn.Parameter(torch.zeros(0))
    randomize(model, 3)
    assert model.weight.shape == (3, 0)


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = (build_tiny(load_config({"model_type": "llama"}), seed=3) for _ in range(2))
    other = build_tiny(load_config({"model_type": "llama"}), seed=4)
    assert torch.equal(_weights(first), _weights(second))
    assert not torch.equal(_weights(first), _weights(other))


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def test_prompts_are_longer_than_the_window_and_lie_on_both_sides_of_the_switch() -> None:
    below, beyond = (
        inputs["position_ids"]
        for inputs in prompts(build_tiny(load_config({"model_type": "llama"})))
    )
    assert below.shape[1] > WINDOW
    assert below.max() < ORIGINAL_POSITIONS < beyond.max()
    assert not torch.equal(below[0], below[1])


def test_tables_that_a_model_works_out_stay_and_what_checkpoints_fill_is_random() -> None:
    model = nn.Module()
    model.decay = nn.Buffer(torch.exp(-torch.arange(5.0)))
    model.bias = nn.Buffer(torch.zeros(5))
    before = model.decay.clone()
    randomize(model, 3)
    assert torch.equal(model.decay, before)
    assert model.bias.unique().numel() == 5

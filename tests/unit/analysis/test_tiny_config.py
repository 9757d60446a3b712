from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from onboard.analysis.behaviour.layer_numbers import named_layers
from onboard.analysis.behaviour.thresholds import build_roomy
from onboard.analysis.source import module_source
from onboard.analysis.tiny.few_experts import WIDTH
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import arguments_of, tiny_config
from onboard.analysis.tiny.tiny_mixers import shrink_mixers
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.analysis.tiny.tiny_prompts import prompt
from onboard.analysis.tiny.tiny_sizes import (
    HIDDEN,
    REACHED,
    VOCABULARY,
    shrink_overrides,
    shrink_sizes,
)


def _tiny(model_type: str, **values: Any) -> Any:
    return tiny_config(load_config({"model_type": model_type, **values}))


def test_floats_that_json_has_not_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mamba2")
    assert math.isinf(config.time_step_limit[1])
    config.save_pretrained(tmp_path)
    again = load_config(json.loads((tmp_path / "config.json").read_text()))
    assert tuple(again.time_step_limit) == tuple(config.time_step_limit)


def test_layers_that_are_named_by_their_index_are_kept() -> None:
    config = _tiny("bamba", attn_layer_indices=[9, 18, 27])
    assert config.layers_block_type == ["linear_attention", "full_attention"]
    assert config.attn_layer_indices == [1]


@pytest.mark.parametrize("field", ["sliding_window", "sliding_window_size", "window_size"])
def test_a_window_cuts_the_prompts_of_a_small_model(field: str) -> None:
    values = {field: 4096}
    shrink_sizes(values, dict(values), {})
    assert values[field] < prompt(0)["input_ids"].shape[1]


class _Lettered(PretrainedConfig):
    model_type = "lettered"

    def __init__(
        self,
        num_hidden_layers: int = 6,
        hybrid_pattern: str = "MEM*EM",
        act: str = "silu",
        **rest: Any,
    ) -> None:
        assert len(hybrid_pattern) == num_hidden_layers
        self.num_hidden_layers = num_hidden_layers
        self.hybrid_pattern = hybrid_pattern
        self.act = act
        super().__init__(**rest)


def test_a_text_with_a_letter_for_each_layer_is_cut_with_them() -> None:
    tiny: Any = tiny_config(_Lettered(4, "M-M*"))
    assert (tiny.num_hidden_layers, tiny.hybrid_pattern, tiny.act) == (3, "M-*", "silu")


class _LastOnes(PretrainedConfig):
    model_type = "last_ones"

    def __init__(self, num_hidden_layers: int = 6, **rest: Any) -> None:
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**rest)
        self.mlp_only_layers = list(range(num_hidden_layers))[:-2]

    @property
    def layers_block_type(self) -> list[str]:
        return ["plain", "plain", "shared", *("plain" for _ in range(self.num_hidden_layers - 3))]


def test_a_class_that_tells_its_layers_apart_anew_has_as_many_as_that_takes() -> None:
    tiny: Any = tiny_config(_LastOnes(12))
    assert tiny.num_hidden_layers == len(tiny.layers_block_type) == 3
    assert tiny.mlp_only_layers == [0]


class _Nested(PretrainedConfig):
    model_type = "nested"

    def __init__(
        self, num_layers: int = 5, kinds: Any = ((("a", "b"), 2), (("c",), 1)), **rest: Any
    ) -> None:
        if sum(len(names) * times for names, times in kinds) != num_layers:
            raise ValueError("other layers than kinds")
        self.num_layers, self.kinds = num_layers, kinds
        super().__init__(**rest)


def test_all_layers_stay_where_a_class_counts_them_in_a_way_of_its_own() -> None:
    tiny: Any = tiny_config(_Nested())
    assert tiny.num_layers == 5


class _Grouped(PretrainedConfig):
    model_type = "grouped"

    def __init__(
        self, num_layers: int = 7, num_cached: int = 3, group_size: int = 4, **rest: Any
    ) -> None:
        self.num_layers, self.num_cached, self.group_size = num_layers, num_cached, group_size
        super().__init__(**rest)
        assert (num_layers - num_cached) % group_size == 0


def test_all_layers_stay_where_a_class_asserts_how_many_there_are() -> None:
    tiny: Any = tiny_config(_Grouped())
    assert tiny.num_layers == 7


def test_layers_that_code_names_by_number_are_there_to_be_proven() -> None:
    every_second = load_config({"model_type": "qwen3_moe", "decoder_sparse_step": 2})
    tiny = build_tiny(every_second)
    assert named_layers(tiny) == [0, 1], "(layer_idx + 1) % decoder_sparse_step == 0"
    assert len(build_roomy(every_second).model.layers) == 3
    assert named_layers(build_tiny(load_config({"model_type": "llama"}))) == []


def test_layers_that_share_keys_and_values_keep_the_layers_that_make_them() -> None:
    full = load_config({"model_type": "gemma3n_text"})
    config: Any = tiny_config(full)
    kinds, all_kinds = (
        set(zip(c.layer_types, c.kv_sharing_modes, strict=True)) for c in (config, full)
    )
    assert kinds == all_kinds
    assert len(all_kinds) == 6
    assert config.num_hidden_layers < full.num_hidden_layers


def test_kinds_that_follow_from_the_position_take_the_first_layers() -> None:
    config = _tiny("recurrent_gemma")
    assert config.layers_block_type == ["linear_attention", "linear_attention", "sliding_attention"]


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_a_block_that_hybrid_layers_share_is_in_two_of_them(model_type: str) -> None:
    assert list(_tiny(model_type).layers_block_type).count("hybrid") == 2


def test_kinds_of_two_periods_are_all_there() -> None:
    """Which layers attend and which are mixtures follow periods of their own."""
    attends, mixes = random.sample(range(2, 6), 2)
    periods = {"attn_layer_period": attends, "expert_layer_period": mixes}
    offsets = {"attn_layer_offset": attends - 1, "expert_layer_offset": random.randrange(mixes)}
    layers = {"num_hidden_layers": attends * mixes, "num_experts": random.choice((3, 16))}
    print({**periods, **offsets, **layers})
    whole = load_config({"model_type": "jamba", **periods, **offsets, **layers})
    kinds = [
        {
            (kind, experts > 1)
            for kind, experts in zip(
                config.layers_block_type, config.layers_num_experts, strict=True
            )
        }
        for config in (whole, tiny_config(whole))
    ]
    assert kinds[0] == kinds[1]


def test_what_single_layers_have_for_themselves_keeps_its_ratio() -> None:
    config = _tiny("gemma4_text")
    heads = {kind: config.per_layer_config[kind].head_dim for kind in config.layer_types}
    assert heads["full_attention"] == 2 * heads["sliding_attention"]


def test_a_second_count_of_the_same_layers_is_made_small() -> None:
    config = _tiny("xlstm")
    assert config.num_blocks == config.num_hidden_layers == 2


def test_configs_inside_a_config_are_made_small() -> None:
    config = _tiny("gemma3")
    for part in (config.text_config, config.vision_config):
        assert (part.hidden_size, part.num_hidden_layers) == (HIDDEN, 2)
    assert config.text_config.vocab_size == VOCABULARY


def test_widths_that_are_a_multiple_of_the_models_stay_one() -> None:
    config = _tiny("zamba2")
    assert (
        config.attention_hidden_size
        == 2 * HIDDEN
        == config.num_attention_heads * config.attention_head_dim
    )


def test_sections_of_rope_fill_the_rotary_channels() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
    config = _tiny("qwen2", rope_parameters=rope)
    assert config.rope_parameters["mrope_section"] == [2, 3, 3]
    assert config.hidden_size // config.num_attention_heads == 16


@pytest.mark.parametrize(
    "model_type", ["mamba2", "gemma3n_text", "dots3_note_text", "reformer", "longcat_flash"]
)
def test_a_small_model_runs_and_is_small(model_type: str) -> None:
    model = build_tiny(load_config({"model_type": model_type, "is_decoder": True}))
    assert isinstance(model.config, PretrainedConfig)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    logits = model(input_ids=torch.arange(12).unsqueeze(0), use_cache=False).logits
    assert torch.isfinite(logits).all()


def test_a_class_that_is_defined_under_a_condition_has_a_source() -> None:
    source = module_source("transformers.models.xlstm.modeling_xlstm")
    assert "xLSTMBlock" in source.classes
    assert "xLSTMForCausalLM" in source.classes


def test_limits_are_where_random_activations_reach_them() -> None:
    config = _tiny("gemma2")
    assert config.attn_logit_softcapping == REACHED < config.final_logit_softcapping < 1
    assert _tiny("gemma2", final_logit_softcapping=0.5).final_logit_softcapping == 0.5
    assert _tiny("gpt_oss").swiglu_limit == REACHED
    assert _tiny("gemma3_text").attn_logit_softcapping is None
    assert _tiny("olmo", clip_qkv=8.0).clip_qkv == REACHED


def test_experts_that_all_tokens_share_are_none_in_small_where_there_are_none() -> None:
    for size, small in ((0, 0), (24, 24), (640, WIDTH)):
        config = _tiny("qwen2_moe", shared_expert_intermediate_size=size)
        assert config.shared_expert_intermediate_size == small


def test_a_list_that_has_as_many_entries_as_there_are_layers_by_chance_is_kept_whole() -> None:
    config = _tiny("falcon_h1", num_hidden_layers=5)
    assert config.num_hidden_layers < 5
    assert len(config.ssm_multipliers) == 5


def test_one_head_has_keys_of_its_own() -> None:
    config = _tiny("llama", hidden_size=32, num_attention_heads=1, num_key_value_heads=1)
    assert config.num_key_value_heads == config.num_attention_heads


def test_a_layer_of_its_own_head_size_has_pairs_to_rotate() -> None:
    full, small = (
        {"head_dim": 28, "num_key_value_heads": 2},
        {"head_dim": 32, "num_key_value_heads": 2},
    )
    small = shrink_overrides({"head_dim": 64, "num_key_value_heads": 1}, small, full)
    assert small == {"head_dim": 72, "num_key_value_heads": 1}


@pytest.mark.parametrize(("heads", "small"), [(9, 4), (8, 8), (5, 5)])
def test_heads_that_share_the_width_go_on_doing_so(heads: int, small: int) -> None:
    """Five share 72 channels no more than 64: they have a size of their own."""
    values = {"num_heads": heads, "hidden_size": HIDDEN}
    shrink_mixers(values, {"num_heads": heads, "hidden_size": 72})
    assert values["num_heads"] == small


@pytest.mark.parametrize("chunk", [16, 24])
def test_a_window_of_whole_chunks_stays_one(chunk: int) -> None:
    full = {"window_size": 64, "chunk_size": chunk}
    small = dict(full)
    shrink_sizes(small, full, {})
    assert small["window_size"] < 9
    assert (small["window_size"] % small["chunk_size"] == 0) == (chunk == 16)


class _Strict(PretrainedConfig):
    """A config inside another one that refuses what it does not know."""

    def __init__(self, ffn_hidden_size: int = 512, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ffn_hidden_size = ffn_hidden_size
        kwargs.pop("model_type", None)
        if kwargs:
            raise ValueError(f"unknown: {kwargs}")


class _Outer(PretrainedConfig):
    model_type = "outer_of_tests"

    def __init__(
        self, hidden_size: int = 512, inner: Any = None, tie: bool = True, **kwargs: Any
    ) -> None:
        self.hidden_size, self.tie = hidden_size, tie
        self.inner = _Strict(**inner) if isinstance(inner, dict) else _Strict()
        super().__init__(tie_word_embeddings=tie, **kwargs)


def test_configs_that_take_nothing_else_are_made_small() -> None:
    small: Any = tiny_config(_Outer(inner={"ffn_hidden_size": 256}, tie=False))
    assert small.hidden_size < 512
    assert small.inner.ffn_hidden_size < 256
    assert small.tie_word_embeddings is False


class _Declaring(PretrainedConfig):
    sub_configs = {"inner": _Strict}

    def __init__(self, inner: Any = None, **kwargs: Any) -> None:
        self.inner = _Strict(**inner) if isinstance(inner, dict) else _Strict()
        super().__init__(**kwargs)


@pytest.mark.parametrize("different", [False, True])
@pytest.mark.parametrize("kind", [_Outer, _Declaring])
def test_values_of_a_config_make_it_whatever_the_configs_inside_refuse(
    kind: type[Any], different: bool
) -> None:
    config = kind(inner={"ffn_hidden_size": 256})
    assert kind.from_dict(arguments_of(config, different)).inner.ffn_hidden_size == 256
    with pytest.raises(ValueError, match="unknown"):
        kind.from_dict(config.to_dict())


def test_projections_of_low_rank_are_no_latent_attention() -> None:
    full = {"kv_lora_rank": 64, "q_lora_rank": 64, "head_dim": 80, "hidden_size": 512}
    values = {**full, "head_dim": 16}
    shrink_mixers(values, full)
    assert values["head_dim"] == 16
    assert values["kv_lora_rank"] < 64


def test_heads_of_each_layer_stay_what_a_constructor_makes_of_them() -> None:
    values = {"num_kv_heads": [3, 4, 5], "hidden_size": 512, "num_attention_heads": 16}
    shrink_sizes(values, dict(values), {})
    assert values["num_kv_heads"] == [3, 4, 5]


def test_a_table_of_sizes_inside_a_config_has_few_words() -> None:
    inside = {"vocab_size": 50257, "dim": 768, "name": "vocab_size"}
    values: dict[str, Any] = {"model": dict(inside), "tokens": {"a": 1}, "hidden_size": 768}
    full = {**values}
    shrink_sizes(values, full, {})
    assert values["model"] == inside | {"vocab_size": VOCABULARY}
    assert values["tokens"] == {"a": 1}
    assert full["model"] == inside


@pytest.mark.parametrize("count", [8, 24])
def test_sizes_of_experts_go_on_making_up_the_width(count: int) -> None:
    """As many as there are experts in small."""
    row = [40, *[16] * (count - 2), 8]
    values: dict[str, Any] = {
        "intermediate_size": sum(row),
        "num_experts": count,
        "size_experts": [row] * 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
    }
    full = dict(values)
    shrink_sizes(values, full, {})
    for small in values["size_experts"]:
        assert sum(small) == values["intermediate_size"]
        assert len(small) == values["num_experts"]
        assert min(small) > 0

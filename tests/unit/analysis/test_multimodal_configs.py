"""Small configs of multimodal models, and which parts of a multimodal model are not its text model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from onboard.analysis.multimodal import is_under
from onboard.analysis.source import sources_hash, sources_of
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.analysis.traits import _from_config
from onboard.errors import OnboardError
from onboard.hf.architecture import causal_lm_class, decoder_config


@pytest.mark.parametrize("model_type", ["gemma3n", "llava"])
def test_tokens_for_images_are_in_the_vocabulary_and_stay_distinct(model_type: str) -> None:
    config: Any = AutoConfig.for_model(model_type)
    small: Any = tiny_config(config)
    names = [
        key
        for key in config.to_dict()
        if "_token_i" in key and isinstance(getattr(config, key), int)
    ]
    assert names
    assert all(0 <= getattr(small, key) < VOCABULARY for key in names)
    assert len({getattr(small, key) for key in names}) == len(
        {getattr(config, key) for key in names}
    )


@pytest.mark.parametrize(
    "model_type", ["gemma3", "qwen2_5_vl", "granite_docling", "phi4_multimodal"]
)
def test_towers_are_small_and_fit_the_text_model(model_type: str) -> None:
    model: Any = build_tiny(AutoConfig.for_model(model_type))
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e7


def test_channels_are_shared_out_to_the_axes_of_positions() -> None:
    small: Any = tiny_config(AutoConfig.for_model("qwen2_5_vl"))
    text = small.text_config
    head_dim = text.hidden_size // text.num_attention_heads
    assert sum(text.rope_parameters["mrope_section"]) == head_dim // 2


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_as_the_whole_config_says(tied: bool) -> None:
    config: Any = AutoConfig.for_model("qwen2_5_vl", tie_word_embeddings=tied)
    small: Any = build_tiny(config)
    own = small.get_output_embeddings().weight is small.get_input_embeddings().weight
    assert _from_config(config, config.text_config)["tied_embeddings"].value is tied is own


def test_the_class_that_a_checkpoint_names_counts() -> None:
    config: Any = AutoConfig.for_model("qwen3_5")
    assert causal_lm_class(config).__name__ == "Qwen3_5ForCausalLM"
    assert decoder_config(config) is config.text_config
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    assert causal_lm_class(config).__name__ == "Qwen3_5ForConditionalGeneration"
    assert decoder_config(config) is config
    with pytest.raises(OnboardError, match="clip is not a causal language model"):
        causal_lm_class(AutoConfig.for_model("clip"))


def test_a_part_is_told_from_one_whose_name_begins_alike() -> None:
    assert is_under("model.visual.proj.weight", ["model.visual"])
    assert not is_under("model.visual_norm.weight", ["model.visual"])


def test_the_hash_is_of_the_text_models_file_too() -> None:
    model = build_tiny(
        AutoConfig.for_model("llava", vision_config={"model_type": "clip_vision_model"})
    )
    own, text = sources = sources_of(model, ["model.vision_tower"])
    assert [source.path.name for source in sources] == ["modeling_llava.py", "modeling_llama.py"]
    changed = [
        sources_hash([own, replace(text, text=text.text + "#")]),
        sources_hash([replace(own, text="#"), text]),
    ]
    assert len({sources_hash(sources), *changed}) == 3
    assert {source.path.name for source in sources_of(model)} > {
        source.path.name for source in sources
    }
    assert sources_hash([own]) == own.sha256()

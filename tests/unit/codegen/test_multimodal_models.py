"""Multimodal models: the text model is generated under the multimodal model's names, the towers
stay transformers' own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import AutoConfig

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.verify.blocks import prove


@cache
def generated(model_type: str) -> tuple[ModelSpec, str]:
    """Analyse and generate the default config of a type, the model made small."""
    config = build_tiny(AutoConfig.for_model(model_type)).config.to_dict()
    spec = analyze(config, model=model_type)
    return spec, generate_model_file(spec)


def test_the_text_model_is_proven_and_the_towers_are_left_out() -> None:
    spec, text = generated("got_ocr2")
    assert spec.eager == ["model.vision_tower", "model.multi_modal_projector"]
    assert not any(block.class_name.startswith("GotOcr2Vision") for block in spec.blocks)
    assert "vision" not in text.replace('eager_modules = ("model.vision_tower"', "")
    assert max(proof.error for proof in prove(text, spec, export=False)) < 1e-5


def test_a_text_model_that_transformers_chooses_by_its_config_has_its_own_config_class() -> None:
    _, text = generated("got_ocr2")
    assert "class Qwen2Model(nn.Module)" in text
    assert "self.language_model = Qwen2Model(config.text_config)" in text
    assert "from transformers import GotOcr2Config, Qwen2Config" in text
    assert "inputs_embeds = self.language_model.embed_tokens(input_ids)" in text


def test_a_weight_outside_of_the_towers_may_not_be_left_out() -> None:
    spec, text = generated("got_ocr2")
    with pytest.raises(OnboardError, match=r"lacks the weight model\.multi_modal_projector"):
        prove(text, spec.model_copy(update={"eager": ["model.vision_tower"]}), export=False)


def test_a_mistake_in_the_text_model_is_found() -> None:
    spec, text = generated("got_ocr2")
    wrong = text.replace(
        "return residual + hidden_states", "return residual + hidden_states * 1.01"
    )
    assert wrong != text
    with pytest.raises(OnboardError, match="differs from transformers"):
        prove(wrong, spec, export=False)


@pytest.mark.parametrize(
    ("model_type", "text_type"), [("emu3", "emu3_text_model"), ("qwen3_5", "qwen3_5_text")]
)
def test_a_class_that_takes_the_text_config_alone_has_the_text_models_family(
    model_type: str, text_type: str
) -> None:
    spec: Any = analyze(AutoConfig.for_model(model_type).to_dict(), model=model_type)
    assert spec.family == text_type
    assert spec.eager == []

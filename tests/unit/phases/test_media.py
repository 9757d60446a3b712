"""A multimodal model's run has a prompt with an image or a sound, made from what its towers take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaConfig, Mistral3Config, VoxtralConfig

from onboard.analysis.tiny.random_weights import randomize
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.config import RuntimeConfig
from onboard.hf.architecture import causal_lm_class
from onboard.runtime.multimodal.image_inputs import ImageInputs
from onboard.runtime.multimodal.towers import Towers
from onboard.workflow.run_model.media import media_prompts
from onboard.workflow.run_model.run_model import run
from onboard.workflow.run_model.run_prompts import LONG_TOKENS
from onboard.workflow.sweep.inputs.checkpoint_defaults import complete, default_config
from tests.unit.runtime.test_prompts_with_images import TEXT, gemma, onboarded, qwen

VISION = {
    **{
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    **{"image_size": 56, "patch_size": 14},
}
SOUND = {
    **{
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    **{"num_mel_bins": 16, "max_source_positions": 32},
}


def llava() -> Any:
    text, vision = {"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", **VISION}
    return LlavaConfig(text_config=text, vision_config=vision, image_token_index=120)


def mistral() -> Any:
    text = {"model_type": "mistral", **TEXT, "head_dim": 16}
    vision = {"model_type": "pixtral", **VISION, "head_dim": 16}
    return Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=120, spatial_merge_size=2
    )


def voxtral() -> Any:
    text = {"model_type": "llama", **TEXT, "head_dim": 16}
    return VoxtralConfig(text_config=text, audio_config=SOUND, audio_token_id=120)


@pytest.mark.parametrize("make", [qwen, gemma, llava, mistral, voxtral])
def test_transformers_takes_the_prompt_and_its_logits_depend_on_the_image(make: Any) -> None:
    model: Any = causal_lm_class(make())._from_config(
        make(), attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, 5)
    [prompt] = media_prompts(model.eval(), torch.float32)
    grown = prompt.followed_by(2)
    ids = torch.tensor([[*prompt.ids, 7, 9]])
    with torch.no_grad():
        logits = model(input_ids=ids, **grown).logits
        pixels = next(name for name in grown if grown[name].is_floating_point())
        other = model(
            input_ids=ids, **{**grown, pixels: grown[pixels] + torch.randn_like(grown[pixels])}
        ).logits
    assert (logits - other)[0, -1].abs().max() > 1e-3


@pytest.mark.parametrize(
    "model_type",
    ["gemma3", "internvl", "llava", "mistral3", "paligemma", "qwen2_5_vl", "qwen3_vl", "voxtral"],
)
def test_the_tiny_model_of_a_types_defaults_takes_a_small_prompt(model_type: str) -> None:
    model: Any = build_tiny(complete(default_config(model_type)))
    [prompt] = media_prompts(model, torch.float32)
    assert len(prompt.ids) < 80
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        logits = model(input_ids=ids, **prompt.inputs).logits
        pixels = next(name for name, value in prompt.inputs.items() if value.is_floating_point())
        other = model(input_ids=ids, **{**prompt.inputs, pixels: -prompt.inputs[pixels]}).logits
    assert (logits - other)[0, -1].abs().max() > 1e-3


def test_a_run_compares_what_follows_an_image_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, root = onboarded(gemma(), tmp_path)
    config = RuntimeConfig(model=str(root / "checkpoint"), device="cpu", dtype="float32")
    result = run(config, root)
    assert result["status"] == "success", result["error"]
    [check] = [
        check
        for check in result["comparison"]["checks"]
        if check["what"] == "with an image or a sound"
    ]
    assert check["tokens"] == LONG_TOKENS
    assert 0 < check["error"] <= check["limit"] == 1e-5

    def prepare(towers: Towers, tokens: list[int], inputs: Any) -> ImageInputs:
        given = right(towers, tokens, inputs)
        return replace(given, embeds=1.01 * given.embeds)

    right = Towers.prepare
    monkeypatch.setattr(Towers, "prepare", prepare)
    result = run(config, root)
    assert result["status"] == "bad_generation"
    assert "with an image or a sound: the logits are not those of transformers" in result["error"]

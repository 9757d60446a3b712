"""Prompts with images: the towers run eagerly, the text graph takes what they give; tokens are
transformers' own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Qwen2_5_VLConfig, Qwen3VLConfig

from onboard import LLM, SamplingParams
from onboard.analysis.analyze import analyze
from onboard.analysis.tiny.random_weights import randomize
from onboard.codegen.model_file import generate_model_file
from onboard.errors import UsageError
from onboard.hf.architecture import causal_lm_class
from onboard.runtime.multimodal.image_inputs import ImageInputs
from onboard.runtime.multimodal.towers import Towers
from onboard.testing import all_logprobs

TOKENS = 6
TEXT = {
    **{
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
    },
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
CACHE = {"kv_cache_config": {"max_tokens": 512, "tokens_per_block": 8}}


def onboarded(config: Any, folder: Path) -> tuple[Any, Path]:
    """Save the tiny model of a config and generate its file; return the model and the root."""
    model: Any = causal_lm_class(config)._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, 5)
    model.eval().save_pretrained(folder / "checkpoint")
    spec = analyze(model.config.to_dict(), model=str(folder))
    (folder / "models").mkdir()
    (folder / "models" / f"modeling_{spec.family}.py").write_text(
        generate_model_file(spec), encoding="utf-8"
    )
    return model, folder


def greedy(model: Any, ids: list[int], inputs: dict[str, Any]) -> list[int]:
    """Return transformers' own greedy tokens."""
    prompt = torch.tensor([ids])
    model.generation_config.eos_token_id = None
    seen = torch.ones_like(prompt)
    tokens = model.generate(
        prompt, **inputs, attention_mask=seen, do_sample=False, max_new_tokens=TOKENS
    )
    return tokens[0, len(ids) :].tolist()


def qwen() -> Any:
    text = {
        **TEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    windows = {"window_size": 56, "fullatt_block_indexes": [1]}
    tokens = {
        "image_token_id": 120,
        "video_token_id": 121,
        "vision_start_token_id": 122,
        "vision_end_token_id": 123,
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config={**vision, **windows}, **tokens)


def gemma() -> Any:
    kinds = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "head_dim": 16,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sizes = {"image_size": 56, "patch_size": 14}
    parts = {"text_config": {**TEXT, **kinds}, "vision_config": {**vision, **sizes}}
    return Gemma3Config(**parts, mm_tokens_per_image=4, image_token_index=120)


def deep_qwen() -> Any:
    """Features of two layers of the tower are added behind two layers of the text model."""
    text = {**TEXT, "num_hidden_layers": 3, "head_dim": 16}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 3, 3],
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    more = {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64, "patch_size": 4}
    tokens = {
        "image_token_id": 120,
        "video_token_id": 121,
        "vision_start_token_id": 122,
        "vision_end_token_id": 123,
    }
    return Qwen3VLConfig(text_config=text, vision_config={**vision, **more}, **tokens)


def qwen_prompt(config: Any, generator: torch.Generator) -> tuple[list[int], dict[str, Any]]:
    """A prompt with an image of 4 x 8 patches, which come down to 2 x 4 tokens."""
    vision = config.vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    ids = [5, 9, *[config.image_token_id] * 8, 11, 17, 23, 4]
    kinds = torch.tensor([[int(token == config.image_token_id) for token in ids]])
    pixels = torch.randn(32, size, generator=generator)
    return ids, {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 8]]),
        "mm_token_type_ids": kinds,
    }


def gemma_prompt(config: Any, generator: torch.Generator) -> tuple[list[int], dict[str, Any]]:
    """A prompt with an image of 4 tokens, which see each other."""
    size = config.vision_config.image_size
    ids = [5, 9, 33, *[config.image_token_id] * 4, 11, 17, 23, 4]
    kinds = torch.tensor([[int(token == config.image_token_id) for token in ids]])
    pixels = torch.randn(1, 3, size, size, generator=generator)
    return ids, {"pixel_values": pixels, "token_type_ids": kinds}


@pytest.mark.parametrize(
    ("make", "prompt_of"), [(qwen, qwen_prompt), (deep_qwen, qwen_prompt), (gemma, gemma_prompt)]
)
def test_tokens_after_an_image_are_those_of_transformers(
    make: Any, prompt_of: Any, tmp_path: Path
) -> None:
    model, root = onboarded(make(), tmp_path)
    generator = torch.Generator().manual_seed(11)
    prompts = [
        prompt_of(model.config, generator),
        ([7, 3, 90, 41, 2], {}),
        prompt_of(model.config, generator),
    ]
    llm = LLM(
        root / "checkpoint",
        root=root,
        device="cpu",
        config={**CACHE, "max_num_tokens": 18, "max_batch_size": 4},
    )
    params = SamplingParams(
        max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=TEXT["vocab_size"]
    )
    outputs = llm.generate(
        [{"prompt_token_ids": ids, "processed": inputs} for ids, inputs in prompts], params
    )
    for (ids, inputs), output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy(model, ids, inputs)
        assert output.logprobs is not None
        with torch.no_grad():
            expected = model(torch.tensor([ids]), **inputs).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(all_logprobs(output.logprobs)[0], expected, rtol=1e-4, atol=1e-4)


def test_positions_behind_an_image_are_moved_on_the_device(tmp_path: Path) -> None:
    """One slot after the other's: an image's, a text's, an image's with another shift."""
    model, root = onboarded(qwen(), tmp_path)
    generator = torch.Generator().manual_seed(17)
    ids, inputs = qwen_prompt(model.config, generator)
    twice = {
        key: torch.cat([each, each], dim=int(key == "mm_token_type_ids"))
        for key, each in inputs.items()
    }
    prompts = [(ids, inputs), ([7, 3, 90, 41, 2], {}), ([*ids, *ids], twice)]
    config = {**CACHE, "max_num_tokens": 18, "max_batch_size": 1}
    config["transforms"] = {"initialize_mrope_delta_cache": {"enabled": True}}
    llm = LLM(root / "checkpoint", root=root, device="cpu", config=config)
    engine, told = llm.engine, []
    set_rows = engine.cache.info.set_rows

    def watched(slots: Any, lengths: Any = None, **others: Any) -> None:
        told.append((lengths is None, others["position_ids"]))
        set_rows(slots, lengths, **others)

    engine.cache.info.set_rows = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    for tokens, given in prompts:
        [output] = llm.generate([{"prompt_token_ids": tokens, "processed": given}], params)
        assert output.token_ids == greedy(model, tokens, given)
        delta = int(model.model.rope_deltas) if given else 0
        assert engine.cache.caches["mrope_delta_cache"][:, 0].tolist() == [
            0,
            delta,
            *[0] * (len(engine._shifts) - 2),
        ]
    assert delta < -4
    assert any(is_decode for is_decode, _ in told)
    assert all(positions is None for is_decode, positions in told if is_decode), (
        "the host moves no position"
    )
    assert not engine.cache.has_states


def test_features_are_added_behind_layers_whose_sums_are_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, root = onboarded(deep_qwen(), tmp_path)
    ids, inputs = qwen_prompt(model.config, torch.Generator().manual_seed(13))
    config = {**CACHE, "max_num_tokens": 18, "max_batch_size": 4}
    config["transforms"] = {"fuse_add_rms_norm": {"enabled": False}}
    llm = LLM(root / "checkpoint", root=root, device="cpu", config=config)
    params = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=TEXT["vocab_size"]
    )

    def first() -> torch.Tensor:
        [output] = llm.generate({"prompt_token_ids": ids, "processed": inputs}, params)
        assert output.logprobs is not None
        return all_logprobs(output.logprobs)[0]

    with torch.no_grad():
        expected = model(torch.tensor([ids]), **inputs).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(first(), expected, rtol=1e-4, atol=1e-4)
    prepare = Towers.prepare

    def without_the_second(towers: Towers, tokens: list[int], given: Any) -> ImageInputs:
        found = prepare(towers, tokens, given)
        assert list(found.added) == [f"model.language_model.layers.{index}" for index in (0, 1)]
        return replace(found, added=dict(list(found.added.items())[:1]))

    monkeypatch.setattr(Towers, "prepare", without_the_second)
    assert (first() - expected).abs().max() > 1e-2


def test_an_image_comes_whole_or_is_refused(tmp_path: Path) -> None:
    model, root = onboarded(gemma(), tmp_path)
    ids, inputs = gemma_prompt(model.config, torch.Generator().manual_seed(12))
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    small = {**CACHE, "max_batch_size": 2}
    llm = LLM(root / "checkpoint", root=root, device="cpu", config={**small, "max_num_tokens": 4})
    assert (
        llm.generate({"prompt_token_ids": ids, "processed": inputs}, params)[0].token_ids
        == greedy(model, ids, inputs)[:2]
    )
    llm = LLM(root / "checkpoint", root=root, device="cpu", config={**small, "max_num_tokens": 3})
    with pytest.raises(UsageError, match="an image has 4 tokens, which have to come in one step"):
        llm.generate({"prompt_token_ids": ids, "processed": inputs}, params)
    with pytest.raises(UsageError, match="refuses these inputs"):
        llm.generate({"prompt_token_ids": ids[:5], "processed": inputs}, params)

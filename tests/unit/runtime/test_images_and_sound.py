"""Prompts with images and sound of files: tokens are those of transformers' own processor and
`generate`.
"""

from __future__ import annotations

import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from onboard import LLM, SamplingParams
from onboard.errors import UsageError
from onboard.testing import all_logprobs
from tests.support.runtime.media_models import FAMILIES, TEXT, MediaModel, make_media_model

TOKENS = 5
CACHE = {"kv_cache_config": {"max_tokens": 1024, "tokens_per_block": 8}}
SETTINGS = {**CACHE, "max_num_tokens": 64, "max_batch_size": 4}
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


def picture(folder: Path, name: str, width: int, height: int, seed: int) -> Path:
    image = Image.frombytes(
        "RGB", (width, height), random.Random(seed).randbytes(3 * width * height)
    )
    image.save(folder / name)
    return folder / name


def sound(folder: Path, name: str, count: int, seed: int) -> Path:
    values = np.random.default_rng(seed).integers(-9000, 9000, count, dtype=np.int16)
    with wave.open(str(folder / name), "wb") as file:
        file.setparams((1, 2, 16_000, count, "NONE", ""))
        file.writeframes(values.tobytes())
    return folder / name


def samples(path: Path) -> Any:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(1 << 20), np.int16).astype(np.float32) / 32768


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    return make_media_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.slow
def test_tokens_after_files_are_those_of_transformers(model: MediaModel, tmp_path: Path) -> None:
    mark, hears = model.mark, "audio_config" in model.hf.config.to_dict()
    if hears:
        files = [sound(tmp_path, "a.wav", 9000, 1), sound(tmp_path, "b.wav", 12_000, 2)]
        key, decoded = "audio", [samples(path) for path in files]
        more: dict[str, Any] = {"sampling_rate": 16_000}
    else:
        files = [picture(tmp_path, "a.png", 60, 40, 1), picture(tmp_path, "b.jpg", 50, 90, 2)]
        key, decoded = "image", [load_image(str(path)) for path in files]
        more = {}
    argument = "audio" if hears else "images"
    llm = LLM(model.checkpoint, root=model.root, device="cpu", config=SETTINGS)
    texts = [f"the cat {mark} sat", f"{mark} and {mark} on", "the mat", f"a dog {mark}"]
    shown = [[0], [0, 1], [], [1]]
    prompts = [
        {"prompt": text, "multi_modal_data": {key: [files[at] for at in which]}}
        for text, which in zip(texts, shown, strict=True)
    ]
    params = GREEDY.model_copy(update={"logprobs": TEXT["vocab_size"]})
    outputs = llm.generate(prompts, params)
    for text, which, output in zip(texts, shown, outputs, strict=True):
        media = {argument: [decoded[at] for at in which], **more} if which else {}
        assert output.token_ids == model.greedy(text, TOKENS, **media)
        given = model.processor(text=[text], return_tensors="pt", **media)
        assert output.prompt_token_ids == given["input_ids"][0].tolist()
        with torch.no_grad():
            expected = model.hf(**given).logits[0, -1].log_softmax(-1)
        assert output.logprobs is not None
        torch.testing.assert_close(all_logprobs(output.logprobs)[0], expected, rtol=1e-4, atol=1e-4)
    again = llm.generate(prompts[1], params)[0]
    assert again.token_ids == outputs[1].token_ids
    assert llm.stats.reused_tokens > 0
    before, longer = llm.stats.reused_tokens, f"{texts[1]} and what else?"
    [more_said] = llm.generate([{**prompts[1], "prompt": longer}], params)
    media = {argument: decoded, **more}
    assert more_said.token_ids == model.greedy(longer, TOKENS, **media)
    assert llm.stats.reused_tokens > before, "the same images begin a longer text"
    swapped = {**prompts[1], "multi_modal_data": {key: [files[1], files[0]]}}
    reused = llm.stats.reused_tokens
    other = llm.generate(swapped, params)[0]
    media = {argument: [decoded[1], decoded[0]], **more}
    assert other.token_ids == model.greedy(texts[1], TOKENS, **media)
    assert other.logprobs is not None
    assert outputs[1].logprobs is not None
    assert other.logprobs[0] != outputs[1].logprobs[0]
    assert llm.stats.reused_tokens == reused, "another image's pages are others"
    asked = [
        {"role": "user", "content": [{"type": key, key: files[0]}, {"type": "text", "text": "so?"}]}
    ]
    [answer] = llm.chat(asked, GREEDY)
    media = {argument: [decoded[0]], **more}
    assert answer.token_ids == model.greedy(f"[user]{mark}so?[assistant]", TOKENS, **media)
    with pytest.raises(UsageError, match="refuses these images or sounds"):
        llm.generate({"prompt": f"{mark}{mark}", "multi_modal_data": {key: files[:1]}}, GREEDY)

"""Sounds of a model whose processor reads messages, not texts: tokens are those of transformers'
own processor and `generate`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from onboard import LLM, SamplingParams
from onboard.cli import main
from onboard.errors import OnboardError, UsageError
from onboard.runtime.tokenizer import Tokenizer
from tests.support.runtime.sound_messages import (
    Hearing,
    make_hearing,
    save_vocabulary,
    sound_file,
)

INSTALLED = importlib.util.find_spec("mistral_common") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="needs mistral-common, the extra tekken")
TOKENS = 5
SETTINGS = {
    "kv_cache_config": {"max_tokens": 4096, "tokens_per_block": 8},
    **{"max_num_tokens": 512, "max_batch_size": 4},
}
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Hearing:
    return make_hearing(tmp_path_factory.mktemp("hearing"))


def user(text: str, *sounds: Path, key: str = "path") -> dict[str, Any]:
    parts = [{"type": "audio", key: str(each) if key == "path" else each} for each in sounds]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@needs_package
def test_tokens_are_those_of_transformers(model: Hearing, tmp_path: Path) -> None:
    files = [sound_file(tmp_path, "a.wav", 9000, 1), sound_file(tmp_path, "b.wav", 12_000, 2)]
    llm = LLM(model.checkpoint, root=model.root, device="cpu", config=SETTINGS)
    shown = [files[:1], files, [files[1]]]
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"audio": which}}
        for text, which in zip(["so?", "and?", "what is it"], shown, strict=True)
    ]
    outputs = llm.generate(prompts, GREEDY)
    for prompt, which, output in zip(prompts, shown, outputs, strict=True):
        asked = [user(prompt["prompt"], *which)]
        assert output.prompt_token_ids == model.given(asked)["input_ids"][0].tolist()
        assert output.token_ids == model.greedy(asked, TOKENS)
    again = llm.generate(prompts[1], GREEDY)[0]
    assert again.token_ids == outputs[1].token_ids
    assert llm.stats.reused_tokens > 0
    talk = [
        user("so?", files[0], key="audio"),
        {"role": "assistant", "content": "yes"},
        user("and this?", files[1], key="audio"),
    ]
    asked = [user("so?", files[0]), talk[1], user("and this?", files[1])]
    assert llm.chat(talk, GREEDY)[0].token_ids == model.greedy(asked, TOKENS)
    assert llm.chat(talk[:1], GREEDY)[0].token_ids == outputs[0].token_ids
    swapped = llm.generate({**prompts[1], "multi_modal_data": {"audio": files[::-1]}}, GREEDY)
    assert swapped[0].token_ids == model.greedy([user("and?", *files[::-1])], TOKENS)


@needs_package
def test_the_command_asks_about_sounds(
    model: Hearing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sound_file(tmp_path, "a.wav", 8000, 3)
    words = ["run", str(model.checkpoint), "what?", "--audio", str(file), "--json"]
    where = ["--root", str(model.root), "--device", "cpu", "--dtype", "float32", "--ignore-eos"]
    assert main.run([*words, *where, "--max-tokens", "5", "--max-seq-len", "512"]) == 0
    [output] = json.loads(capsys.readouterr().out)["outputs"]
    expected = model.greedy([user("what?", file)], TOKENS)
    assert output["outputs"][0]["token_ids"] == expected


def test_a_package_that_is_missing_is_named(
    model: Hearing,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onboard.runtime.multimodal.media_processor.find_spec", lambda _: None)
    file = sound_file(tmp_path, "a.wav", 8000, 3)
    words = ["run", str(model.checkpoint), "what?", "--audio", str(file), "--root", str(model.root)]
    assert main.run([*words, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "need mistral-common, which is not installed" in said
    assert "pip install 'onboard[tekken]'" in said
    assert "Traceback" not in said


def test_images_are_refused(model: Hearing, tmp_path: Path) -> None:
    from PIL import Image

    image = Image.new("RGB", (9, 9))
    llm = LLM(model.checkpoint, root=model.root, device="cpu", config=SETTINGS)
    with pytest.raises(UsageError, match=r"takes no image|need mistral-common"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": image}}, GREEDY)


def test_special_tokens_without_number_are_refused(tmp_path: Path) -> None:
    save_vocabulary(tmp_path)
    path = tmp_path / "tekken.json"
    found = json.loads(path.read_text())
    found["config"]["default_num_special_tokens"] = 10**9
    path.write_text(json.dumps(found))
    with pytest.raises(OnboardError, match=r"1,000,000,000 parts; at most 65,536"):
        Tokenizer.load(tmp_path)

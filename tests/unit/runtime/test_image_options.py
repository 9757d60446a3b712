"""`onboard run --image`, and what is wrong with images that a command or a program names."""

from __future__ import annotations

import json
from base64 import b64encode
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from onboard import LLM, SamplingParams
from onboard.cli import main
from onboard.cli.prompting.media_options import GivenMedia
from onboard.errors import UsageError
from onboard.media.media_limits import MediaLimits
from onboard.media.wave_sounds import Sound
from tests.support.runtime.media_models import MediaModel, make_media_model
from tests.support.runtime.tiny import make_tiny

Capture = pytest.CaptureFixture[str]
TOKENS = 4
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    return make_media_model(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "red.png"
    Image.new("RGB", (40, 30), (200, 30, 40)).save(path)
    return path


def run(model: MediaModel, *words: str) -> int:
    where = ("--root", str(model.root), "--device", "cpu", "--dtype", "float32", "--json")
    limits = ("--max-tokens", str(TOKENS), "--ignore-eos", "--max-seq-len", "256")
    return main.run(["run", str(model.checkpoint), *words, *where, *limits])


def test_the_command_asks_about_images(model: MediaModel, file: Path, capsys: Capture) -> None:
    questions = ["what is it?", "see <image> here"]
    assert run(model, *questions, "--image", str(file)) == 0
    found = json.loads(capsys.readouterr().out)["outputs"]
    texts = ["[user]<image>what is it?[assistant]", "see <image> here"]
    for text, output in zip(texts, found, strict=True):
        expected = model.greedy(text, TOKENS, images=[load_image(str(file))])
        assert output["outputs"][0]["token_ids"] == expected
        assert output["prompt"] == text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["x", "--image", "nowhere.png"], "nowhere.png cannot be read"),
        (["x", "--image", "http://host.example/a.png"], "Give a data: URL or an https: URL"),
        (["x", "--image", "data:image/png;base64,AAAA"], "no format that is read"),
        (["x", "--audio", "data:audio/wav;base64,AAAA"], "no WAV file that is read"),
    ],
)
def test_what_is_no_image_is_one_line(
    model: MediaModel, words: list[str], reason: str, capsys: Capture
) -> None:
    assert run(model, *words) == UsageError.exit_code
    error = json.loads(capsys.readouterr().out)["error"]
    assert reason in json.dumps(error)


def test_images_go_with_prompts_alone(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    tokens = ["--token-ids", "1,2"]
    file = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    for more in (tokens, file, ["x", "--cache", "static_v1"]):
        assert main.run(["run", "nowhere", *more, "--image", "a.png"]) == UsageError.exit_code
        assert "go with prompts and --chat, not with" in capsys.readouterr().err


def test_transformers_is_asked_about_the_same_images(
    model: MediaModel, file: Path, capsys: Capture
) -> None:
    words = ["what is it?", "see <image> here", "--image", str(file)]
    assert run(model, *words, "--enable-pytorch-run", "--benchmark") == 0
    found = json.loads(capsys.readouterr().out)
    texts = ["[user]<image>what is it?[assistant]", "see <image> here"]
    images = [load_image(str(file))]
    expected = [model.greedy(text, TOKENS, images=images) for text in texts]
    assert found["pytorch"] == {"token_ids": expected, "same": [True, True]}
    assert set(found["benchmark"]) == {"onboard", "transformers"}
    assert found["stats"]["reused_tokens"] == 0, "a prefill is not timed twice"


def test_a_conversation_is_about_images(
    model: MediaModel, file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", str(model.checkpoint), "what is it?", "--chat", "--image", str(file)]
    where = ["--root", str(model.root), "--device", "cpu", "--dtype", "float32"]
    given: list[Any] = []
    stream = LLM.stream

    def watched(llm: LLM, prompt: Any, *args: Any, **options: Any) -> Any:
        given.append(llm.prompts.read(prompt, llm.prompts.media(prompt)))
        return stream(llm, prompt, *args, **options)

    monkeypatch.setattr(LLM, "stream", watched)
    monkeypatch.setattr("sys.stdin", StringIO("sure?\n/new\nagain\n"))
    limits = ["--max-tokens", "3", "--max-seq-len", "256"]
    assert main.run([*words, *where, *limits]) == 0
    image = load_image(str(file))
    first, second, third = given
    assert second.text.startswith(f"{first.text}")
    assert second.text.endswith("[user]sure?[assistant]")
    assert third.text == "[user]<image>again[assistant]"
    for read in given:
        assert read.text.count("<image>") == 1
        expected = model.processor(text=[read.text], images=[image], return_tensors="pt")
        assert read.tokens == expected["input_ids"][0].tolist()
        assert torch.equal(read.inputs["pixel_values"], expected["pixel_values"])


def test_a_host_that_is_typed_is_allowed() -> None:
    given = GivenMedia(
        ["https://a.example/x.png", "b.png"], ["data:audio/wav;base64,"], ["c.example"]
    )
    assert given.limits.allowed_media_domains == ["c.example", "a.example"]
    assert [part.kind for part in given.parts] == ["image", "image", "audio"]


def test_a_program_s_images_have_limits(model: MediaModel, file: Path) -> None:
    limits = MediaLimits(max_media=2, max_pixels=2 * 40 * 30)
    settings: dict[str, Any] = {"kv_cache_config": {"max_tokens": 256}, "max_num_tokens": 64}
    llm = LLM(model.checkpoint, root=model.root, device="cpu", config=settings, media=limits)

    def asked(image: Any, text: str = "<image>") -> list[int]:
        prompt = {"prompt": text, "multi_modal_data": {"image": image}}
        return llm.generate(prompt, GREEDY)[0].token_ids

    expected = model.greedy("<image>", TOKENS, images=[load_image(str(file))])
    for given in (file, str(file), file.read_bytes(), Image.open(file), [file]):
        assert asked(given) == expected
    assert len(asked([file, file], "<image><image>")) == TOKENS
    with pytest.raises(UsageError, match="more than 2 images"):
        asked([file] * 3, "<image>" * 3)
    with pytest.raises(UsageError, match="2,440 pixels, and 2,400 are taken"):
        asked([file, Image.new("RGB", (40, 31))], "<image>" * 2)
    with pytest.raises(UsageError, match="an image is 5"):
        asked(5)
    with pytest.raises(UsageError, match="multi_modal_data has 'video'"):
        llm.generate({"prompt": "x", "multi_modal_data": {"video": "x"}}, GREEDY)
    with pytest.raises(UsageError, match="a prompt of token ids has images"):
        llm.generate({"prompt_token_ids": [5], "multi_modal_data": {"image": file}}, GREEDY)
    silence = Sound(np.zeros(9, np.float32), 16_000)
    with pytest.raises(UsageError, match="the model takes no sound"):
        llm.generate({"prompt": "x", "multi_modal_data": {"audio": silence}}, GREEDY)
    part = {"type": "image_url", "image_url": {"url": str(file)}}
    with pytest.raises(UsageError, match="no place of an image"):
        llm.chat([{"role": "user", "content": [part]}], GREEDY)
    for wrong in ({"type": "image_url"}, {"type": "image_url", "image_url": {"url": 3}}):
        with pytest.raises(UsageError, match="has no url"):
            llm.chat([{"role": "user", "content": [wrong]}], GREEDY)


def test_a_model_of_text_alone_says_so(tmp_path: Path, file: Path) -> None:
    tiny = make_tiny(tmp_path)
    llm = LLM(tiny.checkpoint, root=tiny.root, device="cpu", config={"max_seq_len": 64})
    with pytest.raises(UsageError, match="the model takes text alone"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": file}}, GREEDY)


def test_messages_of_a_file_of_requests_name_their_images(
    model: MediaModel, file: Path, tmp_path: Path
) -> None:
    pictures = [Image.open(file), Image.new("RGB", (30, 44), (10, 90, 200))]
    urls = []
    for picture in pictures:
        picture.save(stream := BytesIO(), "PNG")
        urls.append(f"data:image/png;base64,{b64encode(stream.getvalue()).decode()}")
    text = {"type": "text", "text": "what is it?"}
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    named = {"type": "image_url", "image_url": {"url": str(file)}}
    asked = [[images[0], text], [images[0], text, images[1]], [text], [named, text]]
    lines = [
        json.dumps({"custom_id": str(index), "messages": [{"role": "user", "content": content}]})
        for index, content in enumerate(asked)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    where = ["--root", str(model.root), "--device", "cpu", "--dtype", "float32"]
    limits = ["--max-tokens", str(TOKENS), "--ignore-eos", "--max-seq-len", "256"]
    code = main.run(["run", str(model.checkpoint), *files, *where, *limits])
    assert code == 1, "a text in a message is no file's name"
    rows = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    found = {row["custom_id"]: row for row in rows}
    start, end = "[user]", "[assistant]"
    texts = [f"{start}<image>what is it?{end}", f"{start}<image>what is it?<image>{end}"]
    texts.append(f"{start}what is it?{end}")
    for index, (prompt, count) in enumerate(zip(texts, (1, 2, 0), strict=True)):
        media = {"images": pictures[:count]} if count else {}
        expected = model.greedy(prompt, TOKENS, **media)
        answer = found[str(index)]["response"]["body"]["choices"][0]["message"]["content"]
        assert answer == model.processor.tokenizer.decode(expected, skip_special_tokens=True)
    assert "image" in json.dumps(found["3"])

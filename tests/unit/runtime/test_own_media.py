"""Images of a model whose processor and towers are code of its repository: tokens are those of that
code's own processor and `generate`, and the code runs nowhere but in its sandbox.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from onboard import LLM, SamplingParams
from onboard.cli import main
from onboard.errors import ConsentRequiredError, OnboardError, UsageError
from onboard.hub import open_source
from onboard.runtime.multimodal.own_towers import OwnTowers
from onboard.sources.made_folders import kept_folders
from onboard.testing import all_logprobs
from onboard.workflow.remote.sandbox import missing
from tests.support.own_media import own_answers, save_media_code
from tests.support.walls import consent, standing

TOKENS = 6
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
SETTINGS = {"kv_cache_config": {"max_tokens": 1024, "tokens_per_block": 8}, "max_num_tokens": 48}
TIE = 1e-4
"""Two logits nearer than this are as good as one another."""


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONBOARD_CACHE", str(tmp_path_factory.mktemp("cache")))
        kept_folders.cache_clear()
        yield
    kept_folders.cache_clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, own_cache: None) -> Path:
    folder = save_media_code(tmp_path_factory.mktemp("halo") / "checkpoint")
    assert open_source(str(folder)).config()["model_type"] == "qwen2", "whose model file ships"
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    made = []
    for seed, (width, height) in enumerate([(60, 40), (30, 50)]):
        pixels = random.Random(seed).randbytes(3 * width * height)
        made.append(folder / f"{seed}.png")
        Image.frombytes("RGB", (width, height), pixels).save(made[-1])
    return made


@pytest.fixture(scope="module")
def agreed() -> dict[str, bool]:
    return {"trust_remote_code": True, "unsandboxed": bool(missing(standing()))}


@pytest.fixture(scope="module")
def llm(checkpoint: Path, agreed: dict[str, bool]) -> LLM:
    return LLM(checkpoint, root=checkpoint.parent, device="cpu", config=SETTINGS, **agreed)


def about(text: str, *files: Path) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(files)}}


@pytest.mark.slow
def test_tokens_are_those_of_the_repository_s_own_processor_and_generate(
    llm: LLM, checkpoint: Path, pictures: list[Path]
) -> None:
    one, other = pictures
    asked = [
        ("the cat <image-1> sat", [one]),
        ("<image-1> and <image-2> on", [one, other]),
        ("the mat", []),
        ("<image-2> a dog <image-1>", [other, one]),
        ("[user]<image-1>so?[assistant]", [one]),
    ]
    theirs = own_answers(checkpoint, asked, TOKENS)
    assert len({tuple(each["tokens"]) for each in theirs}) == len(asked), "images change the answer"
    params = GREEDY.model_copy(update={"logprobs": len(theirs[0]["logprobs"])})
    outputs = llm.generate([about(text, *files) for text, files in asked[:-1]], params)
    outputs += llm.generate([llm.prompts.question("so?", media_parts(one))], params)
    for output, expected in zip(outputs, theirs, strict=True):
        assert output.prompt_token_ids == expected["ids"]
        assert output.token_ids == expected["tokens"] or expected["margin"] < TIE
        assert output.logprobs is not None
        first = torch.tensor(expected["logprobs"])
        torch.testing.assert_close(all_logprobs(output.logprobs)[0], first, rtol=1e-4, atol=1e-4)
    assert not [name for name in sys.modules if "halo" in name], "nothing of the code is here"
    before = llm.stats.reused_tokens
    [again] = llm.generate([about(*("the cat <image-1> sat", one))], params)
    assert again.token_ids == outputs[0].token_ids
    assert llm.stats.reused_tokens > before
    before = llm.stats.reused_tokens
    [swapped] = llm.generate([about("the cat <image-1> sat", other)], params)
    assert swapped.logprobs != again.logprobs
    assert llm.stats.reused_tokens - before < 8, "another image's pages are others"


def media_parts(*files: Path) -> list[Any]:
    from onboard.cli.prompting.media_options import GivenMedia

    return GivenMedia([str(each) for each in files]).parts


@pytest.mark.slow
def test_placeholders_are_what_the_chat_template_writes(llm: LLM, pictures: list[Path]) -> None:
    assert [llm.prompts.processor.placeholder("image", at) for at in range(3)] == [
        f"<image-{at + 1}>" for at in range(3)
    ]
    parts = media_parts(*pictures)
    text = "<image-2> and <image-1>"
    prompt: Any = llm.prompts.question(text, parts)
    assert prompt["prompt"] == text
    prompt = llm.prompts.question("which?", parts)
    assert prompt["prompt"] == "[user]<image-1><image-2>which?[assistant]"


@pytest.mark.slow
def test_a_text_without_a_place_for_its_image_is_refused(llm: LLM, pictures: list[Path]) -> None:
    with pytest.raises(UsageError, match="no place for images"):
        llm.generate(about("the cat", pictures[0]), GREEDY)
    with pytest.raises(UsageError, match="HaloProcessor refuses"):
        llm.generate(about("the <image-2>", pictures[0]), GREEDY)
    with pytest.raises(UsageError, match="read by code of its repository"):
        llm.generate({"prompt_token_ids": [5, 1], "processed": {"pixel_values": [1]}}, GREEDY)


@pytest.mark.slow
def test_a_process_that_has_ended_is_started_anew(llm: LLM, pictures: list[Path]) -> None:
    prompt = about("the cat <image-1> sat", pictures[0])
    [before] = llm.generate(prompt, GREEDY)
    assert isinstance(llm.engine.towers, OwnTowers)
    session = llm.engine.towers._session
    assert session is not None
    session._child.process.kill()
    session._child.process.wait()
    [after] = llm.generate(prompt, GREEDY)
    assert after.token_ids == before.token_ids
    last = llm.engine.towers._session
    assert last is not None
    assert last is not session
    llm.close()
    assert last._child.process.poll() is not None
    assert llm.generate(prompt, GREEDY)[0].token_ids == before.token_ids


@pytest.mark.slow
def test_the_command_asks_for_consent_first(
    checkpoint: Path, pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(checkpoint), "what?", "--root", str(checkpoint.parent), "--device", "cpu"]
    words += ["--image", str(pictures[0]), "--num-tokens", str(TOKENS), "--ignore-eos", "--json"]
    assert main.run(words) == 3
    said = capsys.readouterr().err
    assert "--trust-remote-code" in said
    assert main.run([*words, *consent()]) == 0
    document = json.loads(capsys.readouterr().out)
    [answer] = own_answers(checkpoint, [("[user]<image-1>what?[assistant]", [pictures[0]])], TOKENS)
    [found] = document["outputs"][0]["outputs"]
    assert found["token_ids"] == answer["tokens"] or answer["margin"] < TIE
    assert any("in a sandbox" in fact for fact in document["facts"])
    assert any("flash_attention_2" in fact for fact in document["facts"])


@pytest.mark.slow
def test_text_alone_needs_no_consent(checkpoint: Path, pictures: list[Path]) -> None:
    text_only = LLM(checkpoint, root=checkpoint.parent, device="cpu", config=SETTINGS)
    assert text_only.generate("the mat", GREEDY)[0].token_ids
    with pytest.raises(ConsentRequiredError, match="code of its repository"):
        text_only.generate(about("<image-1>", pictures[0]), GREEDY)


def changed(checkpoint: Path, folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of the checkpoint with another text in its code."""
    shutil.copytree(checkpoint, folder)
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    return folder


WRONG = {
    "more than a text": (
        "inputs_embeds=embeds, attention_mask=attention_mask, use_cache=True",
        "inputs_embeds=embeds, attention_mask=attention_mask * 0, use_cache=True",
    ),
    "changes the embeddings of a text": (
        "embeds = self.language_model.get_input_embeddings()(input_ids)\n        if pixel",
        "embeds = self.language_model.get_input_embeddings()(input_ids) * 2\n        if pixel",
    ),
    "gives its language model rope_theta|gives its language model": (
        "self.language_model = kinds[",
        "config.text_config.rms_norm_eps = 0.5\n        self.language_model = kinds[",
    ),
    "no numbers": (
        "return self.mlp1(found)",
        "return self.mlp1(found) * float('nan')",
    ),
    "does not call its language model": (
        "return self.language_model.generate(",
        "return torch.zeros(1, 1) if pixel_values is not None else self.language_model.generate(",
    ),
    "is handed": (
        "embeds = embeds.reshape(batch, length, width)",
        "embeds = embeds.reshape(batch, length, width)[:, 1:]; attention_mask = attention_mask[:, 1:]",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("said", sorted(WRONG))
def test_code_that_is_more_than_towers_is_refused(
    said: str, checkpoint: Path, pictures: list[Path], agreed: dict[str, bool], tmp_path: Path
) -> None:
    folder = changed(checkpoint, tmp_path / "halo", "modeling_halo.py", *WRONG[said])
    llm = LLM(folder, root=checkpoint.parent, device="cpu", config=SETTINGS, **agreed)
    with pytest.raises(OnboardError, match=said):
        llm.generate(about("the <image-1>", pictures[0]), GREEDY)


@pytest.mark.slow
def test_hostile_code_reaches_nothing_of_the_user(
    checkpoint: Path, pictures: list[Path], agreed: dict[str, bool], tmp_path: Path
) -> None:
    if agreed["unsandboxed"]:
        pytest.skip("this system has no sandbox")
    secret, left = tmp_path / "secret", tmp_path / "left"
    secret.write_text("key")
    tries = (
        f"import os\nfound = []\n"
        f"for act in (lambda: open({str(secret)!r}).read(), lambda: open({str(left)!r}, 'w'),\n"
        f"            lambda: __import__('socket').create_connection(('127.0.0.1', 9))):\n"
        f"    try:\n        act(); found.append('done')\n    except OSError:\n        pass\n"
        f"assert not found, found\nassert 'HOME_OF_TEST' not in os.environ\n"
    )
    head = '"""Halo: a text'
    folder = changed(checkpoint, tmp_path / "halo", "processing_halo.py", head, f"{tries}{head}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME_OF_TEST", "1")
        llm = LLM(folder, root=checkpoint.parent, device="cpu", config=SETTINGS, **agreed)
        [output] = llm.generate(about("the <image-1>", pictures[0]), GREEDY)
    assert output.token_ids
    assert not left.exists()

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from onboard import LLM, SamplingParams
from onboard.config import RuntimeConfig
from onboard.errors import OnboardError, UsageError
from onboard.runtime.build import eos_token_ids
from onboard.verify.transforms.stages import verify_model
from tests.support.runtime.tiny import Tiny, make_tiny, save_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the cat"


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("speaking")
    size = save_tokenizer(folder / "tokenizer", TEXT)
    model = make_tiny(folder, vocab_size=size, eos_token_id=0)
    shutil.copytree(folder / "tokenizer", model.checkpoint, dirs_exist_ok=True)
    return model


@pytest.fixture(scope="module")
def llm(speaking: Tiny) -> LLM:
    return LLM(speaking.checkpoint, root=speaking.root, device="cpu", dtype="float32")


def _greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **{"max_tokens": 20, "ignore_eos": True, **options})


def test_texts_and_tokens_give_the_same(speaking: Tiny, llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode("the dog")
    by_text, by_ids = llm.generate(["the dog", ids], _greedy())
    expected = speaking.greedy(ids, 20)
    assert by_text.token_ids == by_ids.token_ids == expected
    assert by_text.prompt == "the dog"
    assert by_ids.prompt is None
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
    assert (
        by_text.text
        == by_ids.text
        == llm.engine.tokenizer.hf.decode(expected, skip_special_tokens=True)
    )
    assert by_text.finish_reason == "length"
    assert by_text.logprobs is None


def test_one_prompt_need_not_be_in_a_list(llm: LLM) -> None:
    assert [output.prompt for output in llm.generate("the cat", _greedy(max_tokens=1))] == [
        "the cat"
    ]
    assert [
        output.prompt_token_ids for output in llm.generate([5, 6, 7], _greedy(max_tokens=1))
    ] == [[5, 6, 7]]


def test_tokens_may_be_a_tensor_an_array_or_in_a_mapping(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode("the dog")
    [expected] = llm.generate([ids], _greedy())
    forms = [
        torch.tensor(ids),
        np.array(ids),
        tuple(ids),
        {"prompt_token_ids": ids},
        {"prompt": "the dog"},
    ]
    outputs = [llm.generate(form, _greedy())[0] for form in forms]
    assert [each.token_ids for each in (*outputs, *llm.generate(forms, _greedy()))] == [
        expected.token_ids
    ] * 10
    assert [each.prompt for each in outputs] == [None, None, None, None, "the dog"]


@pytest.mark.parametrize("prompt", [5, None, [[1.5]], [None], {"text": "the dog"}, [[1, "2"]]])
def test_anything_else_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(UsageError, match="a prompt"):
        llm.generate(prompt)


def test_logits_are_those_of_transformers(speaking: Tiny, llm: LLM) -> None:
    ids = torch.randint(0, 250, (40,))
    torch.testing.assert_close(llm.logits(ids), speaking.logits(ids.tolist()), rtol=1e-4, atol=1e-4)


def _early_text(llm: LLM) -> tuple[str, str]:
    """Return a prompt and three whole characters that its text begins with, or soon has: half ones
    change later.
    """
    for words in product(TEXT.split(), repeat=2):
        [output] = llm.generate(" ".join(words), _greedy(max_tokens=15))
        if whole := re.search(r"[\x20-\x7e]{3}", output.text):
            return " ".join(words), whole[0]
    pytest.fail("no text has three characters in a row")


def test_a_stop_text_ends_the_output_and_is_cut_off(llm: LLM) -> None:
    prompt, stop = _early_text(llm)
    [free] = llm.generate(prompt, _greedy())
    [stopped] = llm.generate(prompt, _greedy(stop=[stop, "not there"]))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < 20


def test_the_token_that_stops_an_output_is_not_in_its_text(llm: LLM) -> None:
    [free] = llm.generate("the mat", _greedy())
    decode = llm.engine.tokenizer.decode
    for at in (0, 9):
        token = free.token_ids[at]
        end = free.token_ids.index(token)
        for options in ({}, {"stop": "\0 never"}):
            [stopped] = llm.generate("the mat", _greedy(stop_token_ids=[token], **options))
            assert stopped.token_ids == free.token_ids[: end + 1]
            assert stopped.text == decode(free.token_ids[:end])


def test_a_prompt_may_have_its_own_parameters_and_several_outputs(llm: LLM) -> None:
    params = [
        _greedy(max_tokens=2, logprobs=1),
        SamplingParams(n=2, max_tokens=5, ignore_eos=True, seed=1),
    ]
    first, second = llm.generate(["the", "cat"], params)
    assert [len(each.token_ids) for each in first.outputs + second.outputs] == [2, 5, 5]
    assert first.logprobs is not None
    assert [max(each, key=each.__getitem__) for each in first.logprobs] == first.token_ids
    with pytest.raises(UsageError, match="2 prompts and 1 sampling"):
        llm.generate(["a", "b"], params[:1])


def test_generation_config_names_the_tokens_that_end_a_text(speaking: Tiny, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(speaking.checkpoint, tmp_path / "checkpoint")
    tokens = speaking.greedy([7, 8, 9], 20)
    ends = [0, tokens[4]]  # a random model may choose token 0 before
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    model = LLM(checkpoint, root=speaking.root, device="cpu")
    [output] = model.generate([7, 8, 9], SamplingParams(temperature=0.0, max_tokens=20))
    assert output.token_ids == tokens[: min(tokens.index(end) for end in ends if end in tokens) + 1]
    assert output.finish_reason == "stop"


def test_a_generation_config_without_an_end_leaves_it_to_the_config(
    speaking: Tiny, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(speaking.checkpoint, tmp_path / "checkpoint")
    for text in ('{"eos_token_id": null}', "{}"):
        (checkpoint / "generation_config.json").write_text(text)
        assert LLM(checkpoint, root=speaking.root, device="cpu").engine.eos_token_ids == {0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not valid JSON"),
        ("[]", "no JSON object"),
        ('{"eos_token_id": "x"}', "eos_token_id"),
    ],
)
def test_a_damaged_generation_config_is_named(
    speaking: Tiny, tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(OnboardError, match=f"generation_config.json.*{problem}"):
        eos_token_ids(tmp_path, None)


def test_a_registered_model_is_found_by_name_with_its_configuration(
    speaking: Tiny, tmp_path: Path
) -> None:
    root = shutil.copytree(speaking.root, tmp_path / "root")
    configs = root / "registry" / "configs"
    configs.mkdir(parents=True)
    config = {"model": str(speaking.checkpoint), "max_seq_len": 48, "max_batch_size": 3}
    (configs / "tiny.yaml").write_text(yaml.safe_dump(config))
    entry = {"name": "org/tiny", "config_id": "tiny", "yaml_extra": ["tiny.yaml"]}
    (root / "registry" / "models.yaml").write_text(yaml.safe_dump({"models": [entry]}))
    model = LLM("org/tiny", root=root, device="cpu")
    assert model.engine.capacity == 48
    assert model.engine.cache.info.max_batch_size == 3
    assert model.generate([1, 2], _greedy())[0].token_ids == speaking.greedy([1, 2], 20)


def test_a_configuration_may_be_given_as_mapping_file_or_object(
    speaking: Tiny, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max_seq_len: 40\n")
    for config in ({"max_seq_len": 40}, path, RuntimeConfig(max_seq_len=40)):
        assert (
            LLM(
                speaking.checkpoint, root=speaking.root, device="cpu", config=config
            ).engine.capacity
            == 40
        )
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="config.yaml cannot be read"):
        LLM(speaking.checkpoint, root=speaking.root, config=path)
    with pytest.raises(UsageError, match="Did you mean 'max_seq_len'"):
        LLM(speaking.checkpoint, root=speaking.root, config={"max_seqlen": 40})
    with pytest.raises(UsageError, match="max_seq_len is 500 and the model has 128 positions"):
        LLM(speaking.checkpoint, root=speaking.root, device="cpu", config={"max_seq_len": 500})


def test_the_default_length_is_bounded_by_the_model(llm: LLM) -> None:
    assert llm.engine.capacity == 128


def test_a_model_that_was_not_onboarded_says_which_command_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny(tmp_path, "mistral", sliding_window=None)
    monkeypatch.setattr("onboard.content.CONTENT_ROOT", tmp_path / "nothing shipped")
    with pytest.raises(
        UsageError, match=rf"was not onboarded. Run: onboard {model.checkpoint} --root {tmp_path}"
    ):
        LLM(model.checkpoint, root=tmp_path, device="cpu")


def test_a_checkpoint_without_tokenizer_takes_tokens_only(llama: Tiny) -> None:
    model = LLM(llama.checkpoint, root=llama.root, device="cpu")
    [output] = model.generate([[1, 2, 3]], _greedy())
    assert output.token_ids == llama.greedy([1, 2, 3], 20)
    assert output.text == ""
    with pytest.raises(UsageError, match="no tokenizer"):
        model.generate("the cat")


def test_a_bad_prompt_leaves_nothing_queued(llm: LLM) -> None:
    with pytest.raises(UsageError, match="a prompt has 200 tokens"):
        llm.generate([[1, 2], [3] * 200], _greedy())
    assert not llm.engine.scheduler.busy
    assert llm.engine.cache.allocator.num_free == llm.engine.cache.allocator.num_usable


def test_results_say_what_was_cached_and_how_the_cache_fared(llama: Tiny) -> None:
    config = {"max_batch_size": 1, "max_seq_len": 32, "kv_cache_config": {"tokens_per_block": 4}}
    model = LLM(llama.checkpoint, root=llama.root, device="cpu", config=config)
    prompt, finished = [5, 6, 7, 8, 9, 10], []
    outputs = model.generate(
        [prompt, [1, 2], prompt],
        _greedy(),
        on_step=lambda step: finished.extend(
            chunk.sequence.prompt for chunk in step.chunks if not finished
        ),
        priority=[0, -1, 0],
    )
    assert finished == [[1, 2]]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 4]
    assert outputs[0].token_ids == outputs[2].token_ids == llama.greedy(prompt, 20)
    assert model.engine.stats.cache() == {
        "preemptions": 0, "prefix_hits": 1, "reused_tokens": 4, "state_snapshots": 0, "most_pages": 7, "pages": 8,
    }  # fmt: skip
    assert (
        "at most 7 of 8 cache pages in use, 0 preemptions, 4 tokens reused"
        in model.engine.stats.cache_line()
    )
    with pytest.raises(UsageError, match="there are 1 prompts and 2 priorities"):
        model.generate([prompt], _greedy(), priority=[0, 1])


def test_bad_parameters_leave_nothing_queued(llm: LLM) -> None:
    with pytest.raises(UsageError):
        llm.generate([[1, 2], [3]], [_greedy(), None])  # type: ignore[list-item]
    assert not llm.engine.scheduler.busy


SKIPPED = {"insert_cached_attention": {"skip_on_error": True, "backend": "none"}}
UNMATCHED = {
    "match_sdpa_to_torch_attention": {"enabled": False},
    "insert_cached_attention": {"enabled": False},
}


@pytest.mark.parametrize("transforms", [SKIPPED, UNMATCHED])
def test_a_model_whose_attention_has_no_cache_does_not_generate(
    llama: Tiny, transforms: dict[str, Any]
) -> None:
    with pytest.raises(OnboardError, match="2 attention calls have no cache"):
        LLM(llama.checkpoint, root=llama.root, device="cpu", config={"transforms": transforms})


def test_parameters_that_were_built_with_values_get_those_of_the_checkpoint(llama: Tiny) -> None:
    config = {"transforms": {"build_model": {"device": "cpu"}}}
    model = LLM(llama.checkpoint, root=llama.root, device="cpu", config=config)
    assert model.generate([1, 2], _greedy())[0].token_ids == llama.greedy([1, 2], 20)
    report = verify_model(llama.checkpoint, root=llama.root, device="cpu", config=config)
    assert report.passed, report.first_failure


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(llama: Tiny) -> None:
    with pytest.raises(UsageError, match="no GPU"):
        LLM(llama.checkpoint, root=llama.root, device="cuda")


def test_threads_that_share_it_get_what_each_would_get_alone(speaking: Tiny, llm: LLM) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    words = range(1, len(llm.engine.tokenizer.hf))
    prompts = [draw.choices(words, k=draw.randrange(1, 12)) for _ in range(24)]
    alone = [llm.generate(prompt, _greedy(max_tokens=6))[0].token_ids for prompt in prompts]
    logits = llm.logits(prompts[0])

    def ask(index: int) -> tuple[list[int], bool]:
        (answer,) = llm.generate(prompts[index], _greedy(max_tokens=6))
        return answer.token_ids, torch.equal(llm.logits(prompts[0]), logits)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(len(prompts))))
    assert found == [(tokens, True) for tokens in alone]


def test_it_is_not_called_from_its_own_step(llm: LLM) -> None:
    with pytest.raises(UsageError, match="called while it generates"):
        llm.generate("the cat", _greedy(), on_step=lambda _: llm.generate("the dog") and None)
    assert llm.generate("the cat", _greedy())[0].token_ids


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate(b"the cat"),
        lambda llm: llm.generate([True, False]),
        lambda llm: llm.generate("\ud800"),
        lambda llm: llm.generate([1.5]),
        lambda llm: llm.generate({"text": "x"}),
        lambda llm: llm.generate("the cat", {"max_tokens": 3}),
        lambda llm: llm.generate("the cat", priority="a"),
        lambda llm: llm.generate("the cat", priority=math.nan),
        lambda llm: llm.logits("the cat"),
        lambda llm: SamplingParams(max_tokens=0),
        lambda llm: SamplingParams(n=10**9),
        lambda llm: SamplingParams(stop=5),
        lambda llm: setattr(SamplingParams(), "top_p", 7),
    ],
)
def test_what_makes_no_sense_is_a_usage_error_of_one_line(
    llm: LLM, ask: Callable[[LLM], object]
) -> None:
    with pytest.raises(UsageError) as caught:
        ask(llm)
    assert "\n" not in str(caught.value)


def test_model_kwargs_that_make_no_sense_are_usage_errors(speaking: Tiny) -> None:
    for value, reason in (("x", "expected int"), (10**6, "at most 1,024"), (-3, "model_kwargs")):
        with pytest.raises(OnboardError, match=reason):
            LLM(
                speaking.checkpoint,
                root=speaking.root,
                settings={"model_kwargs": {"num_hidden_layers": value}},
            )

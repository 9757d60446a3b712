"""Penalties, biases and exclusions: beside transformers' processors and a second computation."""

from __future__ import annotations

import itertools
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from onboard import LLM, SamplingParams
from onboard.errors import UsageError
from tests.support.runtime.tiny import Tiny, make_tiny, save_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the cat"


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("speaking")
    size = save_tokenizer(folder / "tokenizer", TEXT)
    model = make_tiny(folder, vocab_size=size, eos_token_id=0)
    shutil.copytree(folder / "tokenizer", model.checkpoint, dirs_exist_ok=True)
    return model


@pytest.fixture(scope="module")
def llm(speaking: Tiny) -> LLM:
    return LLM(speaking.checkpoint, root=speaking.root, device="cpu", dtype="float32")


def generated(llm: LLM, prompt: list[int], **options: Any) -> list[int]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **options})
    return llm.generate([prompt], params)[0].token_ids


def by_transformers(model: Tiny, prompt: list[int], count: int, *processors: Any) -> list[int]:
    """Greedy tokens with transformers' logits processors, each from a full pass."""
    known, process = list(prompt), LogitsProcessorList(processors)
    for _ in range(count):
        scores = process(torch.tensor([known]), model.logits(known)[-1:].float().clone())
        known.append(int(scores[0].argmax()))
    return known[len(prompt) :]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_is_transformers(llm: LLM, speaking: Tiny, penalty: float) -> None:
    prompt = llm.encode("the dog sat")
    expected = by_transformers(
        speaking, prompt, 24, theirs.RepetitionPenaltyLogitsProcessor(penalty)
    )
    assert generated(llm, prompt, repetition_penalty=penalty) == expected
    assert expected != generated(llm, prompt)


def test_no_end_before_min_tokens(llm: LLM, speaking: Tiny) -> None:
    prompt = llm.encode("the cat")
    ends = sorted(set(generated(llm, prompt)))
    processor = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), 7, [0, *ends])
    expected = by_transformers(speaking, prompt, 7, processor)
    got = generated(llm, prompt, min_tokens=7, stop_token_ids=ends, ignore_eos=False)
    assert got[:7] == expected
    assert len(generated(llm, prompt, stop_token_ids=ends)) < 7, "the case is not about min_tokens"


def test_logit_bias_is_added(llm: LLM, speaking: Tiny) -> None:
    prompt = llm.encode("on the mat")
    bias = {3: 2.5, 7: -4.0, 11: 1.25}
    processor = theirs.SequenceBiasLogitsProcessor(
        [[[token], value] for token, value in bias.items()]
    )
    assert generated(llm, prompt, logit_bias=bias) == by_transformers(
        speaking, prompt, 24, processor
    )


def test_presence_and_frequency_penalties(llm: LLM, speaking: Tiny) -> None:
    prompt, known = llm.encode("the dog"), llm.encode("the dog")
    for _ in range(24):
        scores, seen = speaking.logits(known)[-1].double(), Counter(known[len(prompt) :])
        for token, count in seen.items():
            scores[token] -= 0.4 * count + 0.3
        known.append(int(scores.argmax()))
    got = generated(llm, prompt, frequency_penalty=0.4, presence_penalty=0.3)
    assert got == known[len(prompt) :]


def test_only_allowed_tokens_are_chosen(llm: LLM) -> None:
    allowed = [5, 9, 17]
    for temperature in (0.0, 1.0):
        got = generated(
            llm, llm.encode("cat"), allowed_token_ids=allowed, temperature=temperature, seed=3
        )
        assert set(got) <= set(allowed)


def test_only_allowed_tokens_are_chosen_with_the_most_that_parameters_may_be(llm: LLM) -> None:
    extremes: dict[str, list[Any]] = {
        "temperature": [1e-5, 1e12],
        "repetition_penalty": [1e-12, 100.0],
        "logit_bias": [{3: 1e12, 4: -1e12}, {4: 1e12}, {2: 1e12, 4: -1e12}],
        "top_k": [1, 2**31 - 1],
    }
    for values in itertools.product(*extremes.values()):
        options = dict(zip(extremes, values, strict=True))
        found = generated(llm, [3, 4], allowed_token_ids=[3, 4], max_tokens=3, **options)
        assert set(found) <= {3, 4}, options
    beyond = {"temperature": [1e300, math.inf], "repetition_penalty": [1e-300], "top_k": [2**200]}
    for name, values in {**beyond, "logit_bias": [{3: 1e300}, {3: -math.inf}]}.items():
        for value in values:
            with pytest.raises(UsageError, match=name):
                SamplingParams(**{name: value})


def test_bad_words_do_not_come(llm: LLM) -> None:
    """A word of several tokens: its last one is excluded behind the others, and there alone."""
    word, options = "cat sat", {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    ids = llm.engine.tokenizer.encode_plain(word)
    assert len(ids) > 1
    liked = dict.fromkeys(ids, 1e4)
    params = SamplingParams(**options, logit_bias=liked, bad_words=[word])
    tokens = llm.generate(["the"], params)[0].token_ids
    assert set(tokens) <= set(ids), "the bias decides"
    for way in (word, f" {word}"):
        banned = llm.engine.tokenizer.encode_plain(way)
        runs = [tokens[i : i + len(banned)] for i in range(len(tokens))]
        assert banned not in runs


def test_a_bad_word_of_one_token_does_not_come(llm: LLM) -> None:
    options = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    (token,) = llm.engine.tokenizer.encode_plain("cat")[:1]
    word = llm.engine.tokenizer.decode([token])
    liked = {token: 1e4}
    assert set(llm.generate(["the"], SamplingParams(**options, logit_bias=liked))[0].token_ids) == {
        token
    }
    params = SamplingParams(**options, logit_bias=liked, bad_words=[word])
    assert token not in llm.generate(["the"], params)[0].token_ids


def test_neighbours_are_as_without(llm: LLM) -> None:
    """Adjusted and plain requests in one batch: each as alone."""
    prompts = [llm.encode(text) for text in ("the cat", "the dog sat", "on the mat")]
    plain = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    changed = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, repetition_penalty=1.5
    )
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, top_k=8)
    each = [llm.generate([p], s)[0] for p, s in zip(prompts, (plain, changed, drawn), strict=True)]
    together = llm.generate(prompts, [plain, changed, drawn])
    assert [one.token_ids for one in together] == [one.token_ids for one in each]


def test_where_nothing_is_left_the_text_ends(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=9, allowed_token_ids=[4], logit_bias={4: -1e12}
    )
    bad = SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=[0], min_tokens=3)
    assert llm.generate([[1, 2]], params)[0].token_ids  # a bias excludes nothing
    assert llm.generate([[1, 2]], bad)[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"logit_bias": {10**6: 1.0}}, "logit_bias has token 1000000"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids has token -1"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is more than max_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"bad_words": [""]}, "bad_words"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
    ],
)
def test_wrong_values_are_refused(llm: LLM, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        llm.generate([[1, 2]], SamplingParams(**wrong))
    assert not llm.engine.scheduler.busy


def test_no_limit_means_until_the_end(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    output = llm.generate([[1, 2, 3]], params)[0]
    assert len(output.token_ids) == llm.engine.capacity - 3
    assert output.finish_reason == "length"


def test_the_stop_text_is_kept_on_demand(llm: LLM) -> None:
    params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    whole = llm.generate(["the cat"], SamplingParams(**params))[0].text
    stop = whole[5:8]
    without = llm.generate(["the cat"], SamplingParams(**params, stop=stop))[0].text
    kept = SamplingParams(**params, stop=stop, include_stop_str_in_output=True)
    assert llm.generate(["the cat"], kept)[0].text == without + stop
    assert without == whole[: whole.index(stop)]


def test_special_tokens_are_shown_on_demand(llm: LLM) -> None:
    force = {"logit_bias": {0: 1e6}, "max_tokens": 2, "ignore_eos": True, "temperature": 0.0}
    hidden = llm.generate(["the cat"], SamplingParams(**force))[0]
    shown = llm.generate(["the cat"], SamplingParams(**force, skip_special_tokens=False))[0]
    special = llm.engine.tokenizer.hf.convert_ids_to_tokens(0)
    assert hidden.token_ids == [0, 0]
    assert hidden.text == ""
    assert shown.text == special * 2


def test_prompt_logprobs_are_the_models(llm: LLM, speaking: Tiny, tmp_path: Path) -> None:
    prompt = llm.encode("the dog sat on the cat")
    output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=2))[0]
    expected = speaking.logits(prompt).double().log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, found in enumerate(output.prompt_logprobs[1:]):
        assert found is not None
        row = expected[position]
        assert set(found) == {prompt[position + 1], *row.topk(2).indices.tolist()}
        for token, value in found.items():
            assert value == pytest.approx(float(row[token]), abs=1e-4)


def test_all_logprobs_are_those_of_the_vocabulary(llm: LLM, speaking: Tiny) -> None:
    prompt = llm.encode("the dog sat on the cat")
    params = SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    output = llm.generate([prompt], params)[0]
    expected = speaking.logits(prompt).double().log_softmax(-1)
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    for row, found in zip(expected, [*output.prompt_logprobs[1:], output.logprobs[0]], strict=True):
        assert found is not None
        assert sorted(found) == list(range(len(row)))
        for token, value in found.items():
            assert value == pytest.approx(float(row[token]), abs=1e-4)

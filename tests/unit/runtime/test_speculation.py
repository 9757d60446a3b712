"""Drafts: the same tokens in fewer steps, whoever drafts and whatever else is in the batch."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.errors import UsageError
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import Request
from onboard.runtime.speculation.draft_model import ModelDrafter
from onboard.runtime.speculation.ngram import NgramDrafter
from onboard.testing.soak import Soak, in_double
from tests.support.runtime.tiny import TINY, Tiny, make_tiny, save_tokenizer
from tests.unit.runtime.test_engine import LONGROPE

SETTINGS: dict[str, Any] = {"max_num_tokens": 24, "kv_cache_config": {"max_tokens": 88}}


class KnownDrafts:
    """Drafts that are right with a chance of four in five, from answers that are known."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], seed: int) -> None:
        self._answers, self._random = answers, random.Random(seed)

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        return [self._of(request) for request in requests]

    def _of(self, request: Request) -> list[int]:
        known = self._answers[tuple(request.prompt)][request.num_generated :]
        count = self._random.randrange(6)
        return [token if self._random.random() < 0.8 else 0 for token in known[:count]]


def _seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return seed


def _prompts(count: int) -> list[list[int]]:
    return [
        [random.randrange(1, TINY["vocab_size"]) for _ in range(random.randrange(2, 20))]
        for _ in range(count)
    ]


def _answers(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[Request]:
    outputs = [engine.submit(prompt, params)[0] for prompt in prompts]
    engine.run()
    assert engine.memory.num_owned == 0
    engine.memory.check()
    return outputs


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Keys of three windows of eight tokens, pages of which are freed while drafts are checked."""
    layers = ["sliding_attention", "full_attention"]
    folder = tmp_path_factory.mktemp("gemma3")
    options: dict[str, Any] = {"layer_types": layers, "sliding_window": 8, "own_file": False}
    return make_tiny(folder, "gemma3_text", head_dim=16, query_pre_attn_scalar=16, **options)


def _noisy(model: Tiny, folder: Path) -> Path:
    """Return a checkpoint that is like the model's and chooses another token now and then."""
    shutil.copytree(model.checkpoint, folder)
    weights = {
        name: tensor * (1 + 0.05 * torch.randn_like(tensor))
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_no_request_of_a_soak_notices_drafts(name: str, request: Any, tmp_path: Path) -> None:
    """With stops, cancels, priorities, preemptions, reused prefixes, sampling and chunked prompts."""
    model: Tiny = request.getfixturevalue(name)
    speculative = {"draft": str(_noisy(model, tmp_path / "noisy")), "num_tokens": 3}
    engine = in_double(model.engine(**SETTINGS, speculative=speculative))
    alone = in_double(model.engine(kv_cache_config={"enable_block_reuse": False}))
    report = Soak(engine, alone, questions=20, seed=_seed(), cancel_share=0.1).run(70)
    assert report.wrong == []
    stats = engine.stats
    print(stats)
    assert min(stats.drafted_tokens, stats.preemptions, stats.prefix_hits, report.cancelled) > 0


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 3, "top_k": 9, "top_p": 0.9}])
def test_drafts_that_are_mostly_right_save_steps(llama: Tiny, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=30, logprobs=2, **options)
    prompts = _prompts(3)
    plain = in_double(llama.engine())
    expected = _answers(plain, prompts, params)
    known = {tuple(each.prompt): each.generated for each in expected}
    engine = replace(in_double(llama.engine()), drafter=KnownDrafts(known, _seed()))
    found = _answers(engine, prompts, params)
    assert [each.generated for each in found] == [each.generated for each in expected]
    assert engine.stats.steps < 0.7 * plain.stats.steps
    for mine, other in zip(found, expected, strict=True):
        assert [each.keys() for each in mine.logprobs] == [each.keys() for each in other.logprobs]
        assert [max(each.values()) for each in mine.logprobs] == pytest.approx(
            [max(each.values()) for each in other.logprobs], abs=1e-9
        )


def test_a_model_that_drafts_for_itself_is_always_right(llama: Tiny) -> None:
    speculative = {"draft": str(llama.checkpoint), "num_tokens": 3}
    engine = in_double(llama.engine(speculative=speculative))
    assert isinstance(engine.drafter, ModelDrafter)
    in_double(engine.drafter.engine)
    [output] = _answers(engine, _prompts(1), SamplingParams(max_tokens=41, seed=5))
    assert engine.stats.accepted_tokens == engine.stats.drafted_tokens == 30
    assert engine.stats.steps == 11, "the prompt's, and one for four tokens each"
    assert len(output.generated) == 41


def test_a_token_that_ends_the_text_ends_it_among_accepted_ones(llama: Tiny) -> None:
    prompts, free = _prompts(1), SamplingParams(temperature=0.0, max_tokens=20)
    plain = in_double(llama.engine())
    [whole] = _answers(plain, prompts, free)
    last = whole.generated[9]
    ending = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[last])
    engine = replace(
        in_double(llama.engine()),
        drafter=KnownDrafts({tuple(whole.prompt): whole.generated}, _seed()),
    )
    [output] = _answers(engine, prompts, ending)
    first = whole.generated.index(last)
    assert output.generated == whole.generated[: first + 1]
    assert output.finish_reason == "stop"
    assert output.stop_reason == last


def test_requests_with_penalties_run_beside_drafted_ones(llama: Tiny) -> None:
    prompts = _prompts(2)
    each = [
        SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.7),
        SamplingParams(temperature=0.0, max_tokens=20),
    ]
    found = []
    for settings in ({}, {"speculative": {"draft": str(llama.checkpoint)}}):
        engine = in_double(llama.engine(**settings))
        outputs = [
            engine.submit(prompt, params)[0] for prompt, params in zip(prompts, each, strict=True)
        ]
        engine.run()
        found.append([output.generated for output in outputs])
    assert engine.stats.accepted_tokens > 0
    assert found[0] == found[1]


def test_ngrams_of_few_words_are_drafted(tiny: Any) -> None:
    """Of five tokens there are 25 pairs: some that is generated has occurred before."""
    model, prompts = tiny(vocab_size=5), [[1, 2, 3, 4, 2, 1], [4, 4, 3]]
    params = SamplingParams(max_tokens=40, seed=_seed())
    expected = _answers(in_double(model.engine()), prompts, params)
    engine = in_double(model.engine(speculative={"draft": "ngram", "num_tokens": 3}))
    found = _answers(engine, prompts, params)
    assert [each.generated for each in found] == [each.generated for each in expected]
    assert engine.stats.drafted_tokens > 0


def test_ngrams_continue_what_came_before() -> None:
    request = Request([5, 6, 7, 8, 9, 5, 6, 7], SamplingParams(), 0)
    drafter = NgramDrafter(4)
    assert drafter.propose([request]) == [[8, 9, 5, 6]]
    request.tokens += [1, 2]
    assert drafter.propose([request]) == [[]]
    request.tokens += [3, 1, 2]
    assert drafter.propose([request]) == [[3, 1, 2, 3]], "the latest place counts, a period goes on"
    request.tokens[-1:] = [2, 3, 1, 2]
    assert drafter.propose([request])[0][:2] == [3, 1]


RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2},
    "qwen3_next": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}


@pytest.mark.parametrize("family", RECURRENT)
def test_no_request_of_a_soak_notices_that_states_are_taken_back(
    family: str, tmp_path: Path
) -> None:
    """With preemptions, reused prefixes, stops, cancels, sampling and chunked prompts."""
    model = make_tiny(tmp_path, family, own_file=False, **RECURRENT[family], vocab_size=5)
    engine = in_double(model.engine(**SETTINGS, speculative={"draft": "ngram", "num_tokens": 3}))
    alone = in_double(model.engine(kv_cache_config={"enable_block_reuse": False}))
    report = Soak(engine, alone, questions=10, seed=_seed(), cancel_share=0.1).run(30)
    print(engine.stats)
    assert report.wrong == []


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_states_are_taken_back(family: str, tmp_path: Path) -> None:
    """After right drafts and wrong ones, of several sequences in one step, without reuse."""
    model = make_tiny(tmp_path, family, own_file=False, **RECURRENT[family])
    prompts, params = _prompts(4), SamplingParams(max_tokens=30, seed=_seed())
    cache = {"kv_cache_config": {"enable_block_reuse": False, "max_tokens": 88}}
    expected = _answers(in_double(model.engine()), prompts, params)
    known = {tuple(each.prompt): each.generated for each in expected}
    engine = in_double(model.engine(**cache, speculative={"draft": "ngram"}))
    engine = replace(engine, drafter=KnownDrafts(known, _seed()))
    found = _answers(engine, prompts, params)
    assert [each.generated for each in found] == [each.generated for each in expected]
    print(engine.stats)
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens


def test_what_cannot_take_tokens_back_is_refused(llama: Tiny, tmp_path: Any, tiny: Any) -> None:
    with pytest.raises(UsageError, match="rotary tables by length"):
        tiny(rope_parameters=LONGROPE).engine(speculative={"draft": "ngram"})
    layers = ["conv", "full_attention"]
    options: dict[str, Any] = {"layer_types": layers, "block_ff_dim": 48, "own_file": False}
    hybrid = make_tiny(tmp_path / "lfm2", "lfm2", **options)
    with pytest.raises(UsageError, match=r"the draft model .* cannot take tokens back"):
        llama.engine(speculative={"draft": str(hybrid.checkpoint)})


def test_a_draft_model_of_other_words_is_refused(tiny: Any, tmp_path: Path) -> None:
    model = tiny(vocab_size=300)
    other = shutil.copytree(model.checkpoint, tmp_path / "other")
    for folder, text in ((model.checkpoint, "ab ab"), (other, "cd cd")):
        save_tokenizer(folder, text)
    with pytest.raises(UsageError, match="vocabulary"):
        model.engine(speculative={"draft": str(other)})


def test_drafts_of_tokens_that_the_model_has_not_are_cut_off(llama: Tiny) -> None:
    class Unknown:
        def propose(self, requests: Sequence[Request]) -> list[list[int]]:
            return [[TINY["vocab_size"], 1] for _ in requests]

    engine = replace(in_double(llama.engine()), drafter=Unknown())
    [output] = _answers(engine, _prompts(1), SamplingParams(temperature=0.0, max_tokens=6))
    assert engine.stats.drafted_tokens == 0 < len(output.generated)

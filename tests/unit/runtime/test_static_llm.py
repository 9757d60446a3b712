"""Static caches in the forms v1 and v2, and pages, give transformers' greedy tokens."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard import SamplingParams
from onboard.cli import main
from onboard.errors import NoCachedFormError, OnboardError, UsageError
from onboard.runtime.llm import LLM
from onboard.runtime.static.static_llm import StaticLLM
from tests.support.runtime.tiny import Tiny, make_tiny, save_tokenizer
from tests.support.static.models import HARDER, MODELS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 9
Capture = pytest.CaptureFixture[str]


def _check(name: str, folder: Path) -> None:
    model_type, options = {**MODELS, **HARDER}[name]
    tiny = make_tiny(folder, model_type, own_file=False, **options)
    seed = random.randrange(2**31)
    print(f"prompts seed {seed}")
    draw = random.Random(seed)
    # Longer than the windows, as long as one, and one token
    prompts = [[draw.randrange(3, 97) for _ in range(size)] for size in (17, 5, 1)]
    expected = [tiny.greedy(prompt, TOKENS) for prompt in prompts]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    where: dict[str, Any] = {"root": tiny.root, "device": DEVICE, "dtype": "float32"}
    for form in ("static_v1", "static_v2"):
        outputs = StaticLLM(tiny.checkpoint, form, **where).generate(prompts, params)
        assert [output.token_ids for output in outputs] == expected, form
    outputs = LLM(tiny.checkpoint, **where).generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected, "paged"


@pytest.mark.drawn(few=2)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path)


@pytest.mark.drawn(few=2)
@pytest.mark.parametrize("name", HARDER)
def test_tokens_of_more_are_too(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = make_tiny(tmp_path_factory.mktemp("static"), own_file=False, vocab_size=300)
    save_tokenizer(made.checkpoint, "")
    return made


def test_an_output_ends_where_it_has_to(tiny: Tiny) -> None:
    llm = StaticLLM(tiny.checkpoint, "static_v2", root=tiny.root, device="cpu")
    first = tiny.greedy([5, 6, 7], 6)
    stop = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=[first[3]])
    [output] = llm.generate([[5, 6, 7]], stop)
    end = first.index(first[3]) + 1
    assert (output.token_ids, output.finish_reason) == (first[:end], "stop")
    [output] = llm.generate([[5] * 126], SamplingParams(max_tokens=None, temperature=0.0))
    assert (len(output.token_ids), output.finish_reason) == (2, "length")
    assert llm.stats.generated_tokens == end + 2


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"temperature": 1.0}, "a temperature"),
        ({"n": 2}, "several outputs"),
        ({"logprobs": 1}, "log-probabilities"),
        ({"repetition_penalty": 2.0}, "changed logits"),
    ],
)
def test_what_it_does_not_do_is_refused(tiny: Tiny, params: dict[str, Any], what: str) -> None:
    llm = StaticLLM(tiny.checkpoint, "static_v1", root=tiny.root, device="cpu")
    with pytest.raises(UsageError, match=f"{what} was asked for"):
        llm.generate([[1]], SamplingParams(**{"temperature": 0.0, **params}))
    with pytest.raises(UsageError, match="a prompt has 128 tokens"):
        llm.generate([[1] * 128], SamplingParams(temperature=0.0))
    with pytest.raises(UsageError, match="a prompt has token 300"):
        llm.generate([[300]], SamplingParams(temperature=0.0))


def test_models_that_keep_more_are_refused(tmp_path: Path) -> None:
    mamba = make_tiny(tmp_path, "mamba", own_file=False, state_size=4)
    with pytest.raises(NoCachedFormError, match="mixes tokens, and a static cache"):
        StaticLLM(mamba.checkpoint, "static_v1", root=mamba.root, device="cpu")
    long = make_tiny(
        tmp_path / "long",
        "phi3",
        own_file=False,
        pad_token_id=0,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 32,
        },
    )
    with pytest.raises(OnboardError, match="rotary table depends on the length"):
        StaticLLM(long.checkpoint, "static_v1", root=long.root, device="cpu")


def _words(tiny: Tiny, *more: str) -> list[str]:
    return ["run", str(tiny.checkpoint), "--root", str(tiny.root), "--device", "cpu", *more]


@pytest.mark.parametrize("cache", ["paged", "static_v1", "static_v2"])
def test_the_command_compares_and_measures(tiny: Tiny, cache: str, capsys: Capture) -> None:
    more = ["--cache", cache, "--precision", "fp32", "--num-tokens", "4", "--token-ids", "9,8,7"]
    wanted = ["--benchmark", "--enable-pytorch-run"]
    assert main.run(_words(tiny, *more, *wanted, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = tiny.greedy([9, 8, 7], 4)
    assert found["outputs"][0]["outputs"][0]["token_ids"] == tokens
    assert found["pytorch"] == {"token_ids": [tokens], "same": [True]}
    assert set(found["benchmark"]) == {"onboard", "transformers"}
    for times in found["benchmark"].values():
        assert min(times["prefill"], times["duration"]) > 0
        assert times["tokens_per_second"] == pytest.approx(4 / times["duration"])


def test_half_precision_is_the_dtype(tiny: Tiny, capsys: Capture) -> None:
    ids = ["--token-ids", "9,8,7"]
    wanted = [*ids, "--cache", "static_v2", "--enable-pytorch-run"]
    assert main.run(_words(tiny, *wanted, "--precision", "BF16", "--num-tokens", "1")) == 0
    assert "transformers gives the same tokens for 1 of 1 prompts" in capsys.readouterr().err
    assert main.run(_words(tiny, *ids, "--precision", "FP16", "--dtype", "float32")) == 2
    assert "--dtype is float32 and --precision FP16" in capsys.readouterr().err
    assert main.run(_words(tiny, *ids, "--cache", "static_v2", "--strict")) == 2
    assert "neither strict nor batch-invariant" in capsys.readouterr().err
    assert main.run(_words(tiny, *wanted, "--temperature", "1")) == 2
    assert "--enable-pytorch-run compares greedy tokens" in capsys.readouterr().err


def test_a_difference_from_transformers_is_said(
    tiny: Tiny, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(llm: StaticLLM, prompt: list[int], length: int) -> Any:
        yield from [1] * (length - len(prompt))

    monkeypatch.setattr(StaticLLM, "next_tokens", wrong)
    more = ["--cache", "static_v2", "--token-ids", "9,8,7", "--enable-pytorch-run"]
    assert main.run(_words(tiny, *more, "--num-tokens", "4")) == 0
    assert "the same tokens for 0 of 1 prompts" in capsys.readouterr().err


@pytest.mark.parametrize("cache", ["paged", "static_v2"])
def test_another_tokenizer(tiny: Tiny, cache: str, tmp_path: Path, capsys: Capture) -> None:
    """The same text is other tokens: one that has learned a word has fewer."""
    save_tokenizer(tmp_path, "hello hello hello")
    counts = {}
    for name in ("", str(tmp_path)):
        more = ["--tokenizer", name] if name else []
        assert main.run(_words(tiny, "hello", "--cache", cache, *more, "--json")) == 0
        [output] = json.loads(capsys.readouterr().out)["outputs"]
        counts[name] = len(output["prompt_token_ids"])
    assert counts[""] == 5
    assert counts[str(tmp_path)] == 1
    (tmp_path / "empty").mkdir()
    assert main.run(_words(tiny, "a", "--tokenizer", str(tmp_path / "empty"))) == 2
    assert re.search(r"empty has no tokenizer", capsys.readouterr().err)

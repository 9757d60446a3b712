"""Drafts change no token of any family whose caches can take tokens back; the others are refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from onboard import LLM, SamplingParams
from onboard.errors import UsageError
from onboard.runtime.engine import Engine
from onboard.runtime.scheduling.request import Request
from tests.support.sharding.zoo import FAMILIES, ROOT, save_family
from tests.unit.runtime.test_speculation import KnownDrafts

CLOSE = 1e-4
"""Two likeliest tokens whose log-probabilities are closer may change places in another step."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_with_drafts_are_those_without(family: str, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    checkpoint = save_family(tmp_path, family, seed)
    draw = random.Random(seed)
    with LLM(checkpoint, ROOT, device="cpu", settings={"max_seq_len": 96}) as llm:
        engine = llm.engine
        size = min(engine.vocab_size or 2, 200)
        prompts = [[draw.randrange(1, size) for _ in range(count)] for count in (3, 11, 30)]
        expected = _answers(engine, prompts)
        if engine.rope or engine.codebooks.count > 1:
            with pytest.raises(UsageError, match="cannot take tokens back"):
                LLM(checkpoint, ROOT, device="cpu", settings={"speculative": {"draft": "ngram"}})
            return
        known = {tuple(each.prompt): each.generated for each in expected}
        drafting = replace(engine, drafter=KnownDrafts(known, seed))
        found = _answers(drafting, prompts)
    assert drafting.stats.accepted_tokens > 10
    for mine, other in zip(found, expected, strict=True):
        for place, (token, wanted) in enumerate(zip(mine.generated, other.generated, strict=True)):
            if token != wanted:
                first, second, *_ = sorted(other.logprobs[place].values(), reverse=True)
                assert first - second < CLOSE, f"token {place}"
                break


def _answers(engine: Engine, prompts: list[list[int]]) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    outputs = [engine.submit(prompt, params)[0] for prompt in prompts]
    engine.run()
    return outputs

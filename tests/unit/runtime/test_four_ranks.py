"""One model on four ranks, led by this process: the tokens of one rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onboard import LLM, SamplingParams
from onboard.parallel.workers import Workers
from onboard.runtime.ranks.leading import kept_workers
from onboard.testing.prompts import ragged_prompts
from tests.support.sharding.zoo import ROOT, save_family

SETTINGS: dict[str, Any] = {
    "max_seq_len": 64,
    "max_batch_size": 4,
    "max_num_tokens": 32,
    "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 256},
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two key heads, each had by two ranks": ("llama", {}),
    "three key heads, which four ranks' query heads read unevenly": (
        "llama",
        {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8},
    ),
    "latent attention": ("deepseek_v3", {}),
    "state-space layers, two groups": ("mamba2", {}),
    "sinks, windows, stacked experts": ("gpt_oss", {}),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with kept_workers(4) as workers:
        yield workers


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_choose_the_tokens_of_one(workers: Workers, tmp_path: Path, name: str) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    family, changed = CASES[name]
    check(save_family(tmp_path, family, seed, **changed), seed, SETTINGS)


@pytest.mark.exhaustive
def test_four_stages_of_five_layers_choose_the_tokens_of_one(
    workers: Workers, tmp_path: Path
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    checkpoint = save_family(tmp_path, "llama", seed, num_hidden_layers=5)
    check(checkpoint, seed, SETTINGS | {"dist_mapping": {"pp": 4}})


def check(checkpoint: Path, seed: int, settings: dict[str, Any]) -> None:
    found = []
    for ranks in (1, 4):
        with LLM(checkpoint, ROOT, device="cpu", world_size=ranks, settings=settings) as llm:
            prompts = ragged_prompts(int(llm.engine.vocab_size or 0), (3, 17, 29), seed)
            outputs = llm.generate(prompts, GREEDY)
            found.append([list(each.outputs[0].token_ids) for each in outputs])
            if llm.ranks is not None:
                assert len(llm.ranks.shares) == 4
    assert found[0] == found[1]

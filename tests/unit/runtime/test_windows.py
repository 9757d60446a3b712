"""Layers with a sliding window have pages of their own, too few for all of a sequence, and see what
they should.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.config import RuntimeConfig
from onboard.runtime.build import build_engine
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from tests.support.checkpoints import TINY
from tests.support.runtime.tiny import Tiny

WINDOW, PAGE, LENGTH = 9, 4, 96
_CONFIG = {
    **TINY,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "sliding_window": WINDOW,
}
FAMILIES = {"gemma2": [None, WINDOW], "mistral": [WINDOW]}
"""What the layers of each see."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random checkpoint of a family that ships; its model file is the shipped one."""
    seed = random.randrange(2**31)
    print(f"weights seed {seed}")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(request.param, **_CONFIG)
    hf = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    for parameter in hf.parameters():
        parameter.data.normal_(std=0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    folder = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(folder)
    return Tiny(folder, folder, hf)


def _engine(model: Tiny, **runtime: object) -> Engine:
    settings = {
        "max_seq_len": LENGTH,
        "max_batch_size": 2,
        "max_num_tokens": 8,
        "max_tokens": None,
        **runtime,
    }
    cache = {"tokens_per_block": PAGE, "max_tokens": settings.pop("max_tokens")}
    config = RuntimeConfig.model_validate(
        {"device": "cpu", "dtype": "float32", "kv_cache_config": cache, **settings}
    )
    return build_engine(model.checkpoint, config)


def _prompts(*lengths: int) -> list[list[int]]:
    seed = random.randrange(2**31)
    print(f"prompts seed {seed}")
    draw = random.Random(seed)
    return [[draw.randrange(97) for _ in range(length)] for length in lengths]


def _generate(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    outputs = [engine.submit(prompt, params)[0] for prompt in prompts]
    engine.run()
    engine.memory.check()
    assert engine.memory.num_owned == 0
    return [output.generated for output in outputs]


def test_a_window_shorter_than_the_prompt_needs_no_room_for_all_of_it(model: Tiny) -> None:
    """More prompts than the batch holds, in chunks, by a pool that is smaller than one of the
    sequences.
    """
    engine = _engine(model)
    windows = [group.window for group in engine.cache.groups]
    assert sorted(windows, key=str) == sorted(FAMILIES[model.hf.config.model_type], key=str)
    pool = engine.cache.groups[windows.index(WINDOW)].allocator
    assert pool.num_usable * PAGE < 70
    prompts = _prompts(58, 21, 40)
    assert _generate(engine, prompts, 16) == [model.greedy(prompt, 16) for prompt in prompts]


def test_pages_of_a_window_are_freed_while_the_sequence_runs(model: Tiny) -> None:
    engine = _engine(model)
    (output,) = engine.submit(_prompts(50)[0], SamplingParams(temperature=0.0, max_tokens=20))
    index = [group.window for group in engine.cache.groups].index(WINDOW)
    held = []
    while engine.scheduler.busy:
        engine.step()
        held.append(sum(page != 0 for page in output.pages[index]) if output.pages else 0)
    assert max(held) <= -(-WINDOW // PAGE) + 1
    assert output.generated == model.greedy(output.prompt, 20)


def test_logits_of_a_prompt_that_is_longer_than_the_pool(model: Tiny) -> None:
    engine = _engine(model)
    (prompt,) = _prompts(90)
    expected = model.logits(prompt).double()
    error = engine.logits(prompt).double() - expected
    assert error.square().mean().sqrt() < 1e-5 * expected.square().mean().sqrt()


def test_preemption_changes_no_token_and_loses_no_page(model: Tiny) -> None:
    engine = _engine(model, max_tokens=64)
    prompts = _prompts(26, 25)
    assert _generate(engine, prompts, 20) == [model.greedy(prompt, 20) for prompt in prompts]
    if None in FAMILIES[model.hf.config.model_type]:
        assert engine.stats.preemptions > 0
    again = [*prompts[0], *_prompts(5)[0]]  # begins with what is in the cache already
    assert _generate(engine, [again], 8) == [model.greedy(again, 8)]

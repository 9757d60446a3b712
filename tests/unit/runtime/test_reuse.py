"""What requests leave in the cache for later ones, against transformers: pages of attention, states
of recurrences.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from onboard.errors import UsageError
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.testing.soak import Soak, in_double
from tests.support.runtime.tiny import TINY, Tiny, make_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A model with short convolutions, whose state is no matter of pages, between layers of
    attention.
    """
    folder = tmp_path_factory.mktemp("lfm2")
    layers = ["conv", "full_attention", "conv"]
    return make_tiny(
        folder, "lfm2", num_hidden_layers=3, layer_types=layers, block_ff_dim=48, own_file=False
    )


def _prompt(length: int) -> list[int]:
    return [random.randrange(TINY["vocab_size"]) for _ in range(length)]


def _answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    outputs = [engine.submit(prompt, GREEDY)[0] for prompt in prompts]
    engine.run()
    return [output.generated for output in outputs]


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_prompts_that_begin_alike_are_answered_as_transformers_does(
    name: str, request: Any
) -> None:
    model: Tiny = request.getfixturevalue(name)
    engine = model.engine(max_num_tokens=11)
    stem = _prompt(18)
    prompts = [stem + _prompt(length) for length in (3, 7, 5, 1)] + [_prompt(9), stem[:9]]
    for batch in ([prompts[0]], [prompts[1]], prompts[2:], prompts):
        assert _answers(engine, batch) == [model.greedy(prompt, 8) for prompt in batch]
    assert engine.stats.reused_tokens >= 16 * 5
    assert engine.stats.prefix_hits >= 5
    assert (engine.stats.state_snapshots > 0) == (name == "hybrid")


def test_reuse_can_be_turned_off(hybrid: Tiny) -> None:
    engine = hybrid.engine(kv_cache_config={"enable_block_reuse": False})
    prompt = _prompt(20)
    for _ in range(2):
        assert _answers(engine, [prompt]) == [hybrid.greedy(prompt, 8)]
    assert engine.stats.reused_tokens == engine.stats.state_snapshots == 0
    assert engine.cache.info.num_slots == 4 + 2


def test_logits_are_computed_beside_a_full_batch_that_decodes(hybrid: Tiny) -> None:
    engine = hybrid.engine(kv_cache_config={"enable_block_reuse": False})
    prompts, other = [_prompt(length) for length in (5, 9, 3, 7)], _prompt(11)
    outputs = [engine.submit(prompt, GREEDY)[0] for prompt in prompts]
    for _ in range(3):
        engine.step()
    torch.testing.assert_close(engine.logits(other), hybrid.logits(other), rtol=1e-4, atol=1e-4)
    engine.run()
    assert [output.generated for output in outputs] == [
        hybrid.greedy(prompt, 8) for prompt in prompts
    ]


@pytest.mark.parametrize(("name", "tokens"), [("llama", 88), ("hybrid", 72)])
def test_no_request_of_a_small_soak_notices_the_others(
    name: str, tokens: int, request: Any
) -> None:
    model: Tiny = request.getfixturevalue(name)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    engine = in_double(model.engine(max_num_tokens=24, kv_cache_config={"max_tokens": tokens}))
    alone = in_double(model.engine(kv_cache_config={"enable_block_reuse": False}))
    soak = Soak(engine, alone, questions=40, seed=seed)
    report = soak.run(250)
    assert report.wrong == []
    assert report.finished + report.cancelled == 250
    assert report.cancelled > 0
    assert engine.stats.cancelled == report.cancelled
    assert engine.stats.preemptions > 0
    assert engine.stats.prefix_hits > 0
    with pytest.raises(
        UsageError, match=f"a prompt has 70 tokens and a sequence can have {min(64, tokens)}"
    ):
        engine.submit(_prompt(70), GREEDY)


def test_cancelled_outputs_keep_what_they_have_and_free_their_pages(llama: Tiny) -> None:
    engine = llama.engine(max_batch_size=2)
    prompts = [_prompt(5), _prompt(9), _prompt(7)]
    first, second, waiting = (engine.submit(prompt, GREEDY)[0] for prompt in prompts)
    for _ in range(3):
        engine.step()
    assert engine.cancel(waiting)
    assert engine.cancel(first)
    assert not engine.cancel(first)
    engine.run()
    assert (first.finish_reason, first.generated) == ("abort", llama.greedy(prompts[0], 3))
    assert (waiting.finish_reason, waiting.generated) == ("abort", [])
    assert (second.finish_reason, second.generated) == ("length", llama.greedy(prompts[1], 8))
    assert engine.stats.cancelled == 2
    assert engine.memory.num_owned == 0

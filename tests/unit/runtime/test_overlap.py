"""Steps that are started before the tokens of the one before are known: the same answers, and
nothing lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.testing.soak import Soak, in_double
from tests.support.runtime.tiny import TINY, Tiny, make_tiny
from tests.unit.runtime.test_engine import LONGROPE


def _prompt(length: int) -> list[int]:
    return [random.randrange(TINY["vocab_size"]) for _ in range(length)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    layers = ["conv", "full_attention"]
    return make_tiny(
        tmp_path_factory.mktemp("lfm2"), "lfm2", layer_types=layers, block_ff_dim=48, own_file=False
    )


def _answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs = [engine.submit(prompt, params)[0] for prompt in prompts]
    engine.run()
    assert engine.memory.num_owned == 0
    return [output.generated for output in outputs]


@pytest.mark.parametrize(("name", "tokens"), [("llama", 88), ("hybrid", 72)])
def test_no_request_of_a_soak_notices_that_steps_overlap(
    name: str, tokens: int, request: Any
) -> None:
    """With stops, cancels, priorities, preemptions, reused prefixes and chunked prompts; a soak may
    drop no token.
    """
    model: Tiny = request.getfixturevalue(name)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    engine = in_double(
        model.engine(max_num_tokens=24, overlap=True, kv_cache_config={"max_tokens": tokens})
    )
    alone = in_double(model.engine(kv_cache_config={"enable_block_reuse": False}))
    report = Soak(engine, alone, questions=40, seed=seed).run(250)
    assert report.wrong == []
    stats = engine.stats
    assert stats.steps_ahead > 0.5 * stats.steps
    assert min(stats.preemptions, stats.prefix_hits, report.cancelled) > 0


def test_a_step_ends_with_its_tokens_known(llama: Tiny) -> None:
    engine, prompts = llama.engine(overlap=True), [_prompt(5), _prompt(9)]
    first, second = (
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=8))[0]
        for prompt in prompts
    )
    for count in range(1, 4):
        engine.step()
        assert first.generated == llama.greedy(prompts[0], count)
    assert engine.cancel(first)
    engine.run()
    assert second.generated == llama.greedy(prompts[1], 8)
    assert (engine.stats.steps_ahead, engine.stats.dropped_tokens, engine.stats.steps) == (7, 1, 8)


def test_what_ends_by_its_length_computes_no_token_too_many(llama: Tiny) -> None:
    engine = llama.engine(overlap=True, max_seq_len=20)
    prompts = [_prompt(12), _prompt(3)]
    answers = _answers(engine, prompts, SamplingParams(temperature=0.0, max_tokens=10))
    assert answers == [llama.greedy(prompts[0], 8), llama.greedy(prompts[1], 10)]
    assert (engine.stats.dropped_tokens, engine.stats.steps) == (0, 10)


@pytest.mark.parametrize("options", [{"seed": 3}, {"seed": 4, "top_k": 5, "top_p": 0.9}])
def test_sampled_tokens_and_log_probabilities_are_the_same(
    llama: Tiny, options: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=12, logprobs=2, **options)
    prompts = [_prompt(7), _prompt(18)]
    ours, theirs = llama.engine(overlap=True, max_num_tokens=10), llama.engine()
    found = [
        [ours.submit(p, params)[0] for p in prompts],
        [theirs.submit(p, params)[0] for p in prompts],
    ]
    for engine in (ours, theirs):
        engine.run()
    assert [each.generated for each in found[0]] == [each.generated for each in found[1]]
    for mine, other in zip(*found, strict=True):
        assert [each.keys() for each in mine.logprobs] == [each.keys() for each in other.logprobs]
        assert [max(each.values()) for each in mine.logprobs] == pytest.approx(
            [max(each.values()) for each in other.logprobs], abs=1e-5
        )


def test_rotary_tables_that_depend_on_the_length_wait_for_each_token(
    tiny: Callable[..., Tiny],
) -> None:
    model = tiny(rope_parameters=LONGROPE)
    engine, prompts = model.engine(overlap=True), [_prompt(22), _prompt(3)]
    answers = _answers(engine, prompts, SamplingParams(temperature=0.0, max_tokens=8))
    assert answers == [model.greedy(prompt, 8) for prompt in prompts]
    assert engine.stats.steps_ahead == 0

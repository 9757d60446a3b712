"""Steps that read prompts or drafts, padded to sizes that were captured: every token is transformers'
own, and a step that is faster by itself is left as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from onboard.cache.captured_steps import CapturedSteps, StepTimes
from onboard.cache.step_buffer import StepSizes
from onboard.graph.compile.captured_prompts import draft_sizes
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.testing.soak import in_double
from tests.support.runtime.tiny import TINY, Tiny
from tests.unit.runtime.test_speculation import KnownDrafts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
FASTER = dict.fromkeys((True, False), StepTimes(0.5, 1.0))
SIZES = [StepSizes(8, 5, 5), StepSizes(24, 5, 5), StepSizes(64, 5, 5)]


def _prompt(length: int) -> list[int]:
    return [random.randrange(TINY["vocab_size"]) for _ in range(length)]


def _check(model: Tiny, engine: Engine, lengths: list[int]) -> list[tuple[int, int]]:
    """Compare tokens; return the numbers of tokens and sequences of steps, padding included."""
    info = engine.cache.info
    sizes = [size for size in SIZES if size.tokens <= info.max_num_tokens]
    info.captured = CapturedSteps(63, dict.fromkeys(sizes, FASTER))
    prompts, steps = [_prompt(length) for length in lengths], []
    outputs = [engine.submit(prompt, GREEDY)[0] for prompt in prompts]
    engine.run(lambda _: steps.append(info.sizes))
    expected = [model.greedy(prompt, 16) for prompt in prompts]
    assert [output.generated for output in outputs] == expected
    return [(size.tokens, size.sequences) for size in steps]


def test_whole_prompts(llama: Tiny) -> None:
    steps = _check(llama, llama.engine(), [3, 9, 7])
    assert steps[0] == (24, 5)
    assert set(steps[1:]) == {(3, 3)}


@pytest.mark.parametrize("reuse", [True, False])
def test_chunks_beside_sequences_that_decode(llama: Tiny, reuse: bool) -> None:
    engine = llama.engine(max_num_tokens=24, kv_cache_config={"enable_block_reuse": reuse})
    steps = _check(llama, engine, [23, 2, 31, 17, 11, 5])
    assert (24, 5) in steps
    assert (8, 5) in steps


def test_a_full_batch_and_a_full_size_leave_room_for_no_padding(llama: Tiny) -> None:
    assert _check(llama, llama.engine(), [9, 7, 6, 2])[0] == (24, 5)


def test_choices_of_requests_and_log_probabilities_are_their_own(llama: Tiny) -> None:
    """Beside an engine whose steps are not padded; two of four requests have a say in their tokens."""
    prompts = [_prompt(length) for length in (3, 9, 7, 5)]
    wishes: list[dict[str, Any]] = [
        {},
        {"logit_bias": {5: 100.0}},
        {"seed": 7, "temperature": 1.0},
        {},
    ]
    found = []
    for padded in (False, True):
        engine = llama.engine(max_num_tokens=24)
        if padded:
            engine.cache.info.captured = CapturedSteps(63, dict.fromkeys(SIZES[:2], FASTER))
        outputs = [
            engine.submit(
                prompt,
                SamplingParams(**{"temperature": 0.0, "max_tokens": 9, "logprobs": 2, **wish}),
            )[0]
            for prompt, wish in zip(prompts, wishes, strict=True)
        ]
        engine.run()
        found.append([(each.generated, each.logprobs) for each in outputs])
    assert found[1][1][0] == [5] * 9
    for (tokens, scores), (others, expected) in zip(*found, strict=True):
        assert tokens == others
        for one, other in zip(scores, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_windows_in_several_groups_of_pages(tiny: Callable[..., Tiny]) -> None:
    kinds = ["sliding_attention", "full_attention"] * (TINY["num_hidden_layers"] // 2 + 1)
    layers = {"layer_types": kinds[: TINY["num_hidden_layers"]], "use_sliding_window": True}
    model = tiny("qwen2", own_file=False, sliding_window=6, **layers)
    assert (24, 5) in _check(model, model.engine(max_num_tokens=24), [29, 4, 18])


def test_recurrent_states_of_sequences_are_their_own(tiny: Callable[..., Tiny]) -> None:
    sizes = {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2}
    model = tiny("mamba2", own_file=False, **{**sizes, "hidden_size": 32, "chunk_size": 8})
    assert (24, 5) in _check(model, model.engine(max_num_tokens=24), [29, 4, 18])


@pytest.mark.parametrize(
    ("tokens", "sequences", "whole", "size"),
    [
        (8, 4, False, 8),
        (9, 4, True, None),
        (15, 1, True, None),
        (16, 1, True, 24),
        (24, 1, True, 24),
        (24, 1, False, None),
        (8, 5, False, None),
        (64, 1, False, 64),
        (65, 1, False, None),
    ],
)
def test_the_size_that_serves_a_step(
    tokens: int, sequences: int, whole: bool, size: int | None
) -> None:
    """With 24 tokens a replay is as fast as 16 prompt tokens by themselves."""
    times: dict[StepSizes, Any] = dict.fromkeys(SIZES, FASTER)
    times[SIZES[0]] = {True: StepTimes(1.0, 1.0), False: StepTimes(1.0, 1.0)}
    times[SIZES[1]] = {True: StepTimes(2.0, 3.0), False: StepTimes(4.0, 3.0)}
    served = CapturedSteps(63, times).serving(StepSizes(tokens, sequences, sequences), whole=whole)
    assert (served and served.tokens) == size


DRAFTED = draft_sizes(3, 64, 4, 64)


def _check_drafts(model: Tiny, wishes: list[dict[str, Any]], **settings: Any) -> None:
    """Compare a drafting engine whose steps are padded with one that has no drafts."""
    each = [SamplingParams(**{"max_tokens": 14, "logprobs": 2, **wish}) for wish in wishes]
    prompts = [_prompt(random.randrange(2, 14)) for _ in wishes]
    plain, engine = (in_double(model.engine(**settings)) for _ in range(2))
    expected = [plain.submit(*asked)[0] for asked in zip(prompts, each, strict=True)]
    plain.run()
    known = {tuple(each.prompt): each.generated for each in expected}
    engine = replace(engine, drafter=KnownDrafts(known, random.randrange(2**31)))
    info, sizes = engine.cache.info, set()
    info.captured_drafts = CapturedSteps(63, dict.fromkeys(DRAFTED, FASTER))
    found = [engine.submit(*asked)[0] for asked in zip(prompts, each, strict=True)]
    engine.run(lambda step: sizes.add(info.sizes) if step.num_drafts else None)
    assert [each.generated for each in found] == [each.generated for each in expected]
    for mine, other in zip(found, expected, strict=True):
        for one, another in zip(mine.logprobs, other.logprobs, strict=True):
            assert one == pytest.approx(another, abs=1e-9)
    assert engine.stats.accepted_tokens > 10
    assert len(sizes & set(DRAFTED)) > 1


def test_drafts_and_choices_of_their_rows(llama: Tiny) -> None:
    """Beside prompts, and requests whose logits are changed, which have no drafts."""
    greedy = {"temperature": 0.0}
    penalty = {"temperature": 0.0, "repetition_penalty": 1.3}
    first = {"temperature": 0.0, "max_tokens": 48}  # the last steps have it alone
    _check_drafts(llama, [first, {"seed": 3, "top_k": 9}, greedy, penalty, {"seed": 5}, greedy])


def test_drafts_in_windows(tiny: Callable[..., Tiny]) -> None:
    model = tiny("mistral", own_file=False, sliding_window=6)
    greedy = {"temperature": 0.0}
    _check_drafts(model, [{**greedy, "max_tokens": 48}, greedy, greedy, greedy], max_num_tokens=24)


def test_sizes_of_drafts() -> None:
    assert [StepSizes(4, 2, 4), StepSizes(8, 3, 8), StepSizes(16, 5, 16)] == DRAFTED
    assert [each.sequences for each in draft_sizes(1, 8192, 256, 64)] == [2, 3, 5, 9, 17]
    assert [each.tokens for each in draft_sizes(31, 100, 6, 64)] == [32, 64]
    assert [each.tokens for each in draft_sizes(31, 8192, 64, 64)] == [32, 64, 128, 256]
    assert draft_sizes(31, 8192, 64, 32) == []
    assert [each.rows for each in draft_sizes(2, 8192, 6, 64)] == [3, 6, 12, 18]


@pytest.mark.parametrize(
    ("step", "size"),
    [
        ((4, 1, 4), 4),
        ((3, 1, 3), 4),
        ((5, 2, 5), 8),
        ((4, 2, 4), 8),
        ((12, 2, 9), 16),
        ((17, 2, 5), None),
    ],
)
def test_the_size_that_serves_drafts(step: tuple[int, int, int], size: int | None) -> None:
    captured = CapturedSteps(63, dict.fromkeys(DRAFTED, FASTER))
    served = captured.serving(StepSizes(*step), whole=False)
    assert (served and served.tokens) == size

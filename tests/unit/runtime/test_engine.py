"""The whole road against transformers: ragged batches, chunked prefill, windows, preemption,
padding, long RoPE.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard.errors import NotFiniteError, UsageError
from onboard.ops.sampling.sampling import NOT_A_TOKEN
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.pending_step import PendingStep
from tests.support.runtime.tiny import TINY, Tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def _prompt(length: int) -> list[int]:
    return [random.randrange(TINY["vocab_size"]) for _ in range(length)]


def _generate(
    engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    outputs = [engine.submit(prompt, params)[0] for prompt in prompts]
    engine.run()
    assert all(output.finish_reason == "length" for output in outputs)
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_usable
    return [output.generated for output in outputs]


def _rmse_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


@pytest.fixture(scope="module")
def engine(llama: Tiny) -> Engine:
    return llama.engine()


def test_logits_are_those_of_transformers(llama: Tiny, engine: Engine) -> None:
    prompt = _prompt(61)
    logits = engine.logits(prompt)
    assert logits.shape == (61, TINY["vocab_size"])
    assert logits.dtype == torch.float32
    assert _rmse_ratio(logits, llama.logits(prompt)) < 1e-5


def test_four_ragged_prompts_in_one_batch_decode_as_transformers_does(
    llama: Tiny, engine: Engine
) -> None:
    prompts = [_prompt(length) for length in (3, 17, 9, 30)]
    steps = engine.stats.steps
    assert _generate(engine, prompts) == [llama.greedy(prompt, 32) for prompt in prompts]
    # One for all prompts, then one for each further token of all
    assert engine.stats.steps - steps == 32


@pytest.mark.parametrize("max_num_tokens", [5, 16])
def test_prefill_in_chunks_gives_the_same_tokens_and_logits(
    llama: Tiny, max_num_tokens: int
) -> None:
    engine = llama.engine(max_num_tokens=max_num_tokens)
    prompts = [_prompt(length) for length in (23, 2, 31)]
    assert _generate(engine, prompts) == [llama.greedy(prompt, 32) for prompt in prompts]
    assert _rmse_ratio(engine.logits(prompts[2]), llama.logits(prompts[2])) < 1e-5


def test_a_pool_that_is_too_small_preempts_and_changes_no_token(llama: Tiny) -> None:
    engine = llama.engine(kv_cache_config={"max_tokens": 72})
    prompts = [_prompt(length) for length in (12, 20, 7, 15)]
    assert _generate(engine, prompts) == [llama.greedy(prompt, 32) for prompt in prompts]
    assert engine.stats.preemptions > 0


def test_more_prompts_than_the_batch_holds_are_served_in_turn(llama: Tiny) -> None:
    engine = llama.engine(max_batch_size=2)
    prompts = [_prompt(random.randrange(1, 20)) for _ in range(7)]
    assert _generate(engine, prompts) == [llama.greedy(prompt, 32) for prompt in prompts]


def test_padding_to_captured_sizes_changes_no_token(llama: Tiny) -> None:
    engine = llama.engine()
    engine.cache.info.decode_sizes = [4]
    prompts = [_prompt(5), _prompt(11)]
    sizes = []
    outputs = [engine.submit(prompt, GREEDY)[0] for prompt in prompts]
    engine.run(lambda _: sizes.append(engine.cache.info.args["kv_lens"].shape[0]))
    assert [output.generated for output in outputs] == [
        llama.greedy(prompt, 32) for prompt in prompts
    ]
    assert sizes[1:] == [4] * 31


def test_a_window_smaller_than_the_prompt(tiny: Callable[..., Tiny]) -> None:
    mistral = tiny("mistral", sliding_window=6)
    engine = mistral.engine(max_num_tokens=10)
    prompts = [_prompt(29), _prompt(4)]
    assert _rmse_ratio(engine.logits(prompts[0]), mistral.logits(prompts[0])) < 1e-5
    assert _generate(engine, prompts) == [mistral.greedy(prompt, 32) for prompt in prompts]


def test_what_was_done_is_counted(llama: Tiny) -> None:
    engine = llama.engine()
    engine.gm.replays = 0  # as a graph has that was captured for other sizes
    start = time.perf_counter()
    _generate(engine, [_prompt(3)], SamplingParams(temperature=0.0, max_tokens=1))
    assert not any("CUDA" in fact for fact in engine.facts)  # no sequence has decoded
    _generate(engine, [_prompt(5), _prompt(9)])
    assert 0 < engine.stats.seconds < time.perf_counter() - start
    assert (engine.stats.prompt_tokens, engine.stats.generated_tokens) == (17, 65)
    assert engine.stats.tokens_per_second * engine.stats.seconds == pytest.approx(65)
    assert [fact for fact in engine.facts if "CUDA" in fact] == [
        "decode steps of 2 sequences ran without a CUDA graph"
    ]


@pytest.mark.parametrize(
    ("row", "ended", "fails"), [(0, None, False), (1, "length", False), (1, None, True)]
)
def test_logits_that_are_not_finite_are_an_error_where_a_token_is_wanted(
    row: int, ended: Any, fails: bool
) -> None:
    complete = [(row, SimpleNamespace(finish_reason=ended))]
    step: Any = SimpleNamespace(rows=SimpleNamespace(complete=complete))
    pending = PendingStep(step, lambda: [5, NOT_A_TOKEN], None)
    if fails:
        with pytest.raises(NotFiniteError):
            pending.chosen()
    else:
        assert pending.chosen() == [5, NOT_A_TOKEN]


def test_a_prompt_may_leave_room_for_a_single_token(llama: Tiny) -> None:
    assert (
        len(
            _generate(llama.engine(), [_prompt(63)], SamplingParams(temperature=0.0, max_tokens=1))[
                0
            ]
        )
        == 1
    )


def test_logits_are_given_in_float32_whatever_the_model_computes_in(llama: Tiny) -> None:
    engine = llama.engine(dtype="bfloat16")
    logits = engine.logits(_prompt(5))
    assert logits.dtype == torch.float32


def test_tied_embeddings(tiny: Callable[..., Tiny]) -> None:
    model = tiny(tie_word_embeddings=True)
    prompt = _prompt(12)
    assert _rmse_ratio(model.engine().logits(prompt), model.logits(prompt)) < 1e-5


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}


@pytest.mark.parametrize(
    "runtime", [{}, {"max_num_tokens": 7}, {"kv_cache_config": {"max_tokens": 80}}]
)
def test_steps_never_mix_rotary_tables(tiny: Callable[..., Tiny], runtime: dict[str, Any]) -> None:
    """Prompts below, at and above the switch, most of which cross it while they decode."""
    model = tiny(rope_parameters=LONGROPE)
    engine = model.engine(**runtime)
    prompts = [_prompt(length) for length in (3, 24, 30, 22)]
    assert _generate(engine, prompts) == [model.greedy(prompt, 32) for prompt in prompts]
    assert _rmse_ratio(engine.logits(prompts[2]), model.logits(prompts[2])) < 1e-5
    assert _rmse_ratio(engine.logits(prompts[1]), model.logits(prompts[1])) < 1e-5


def test_ends_by_eos_stop_tokens_and_lengths(llama: Tiny) -> None:
    engine = llama.engine()
    prompt = _prompt(6)
    tokens = llama.greedy(prompt, 32)
    last = tokens.index(tokens[10])
    engine.eos_token_ids = frozenset([tokens[10]])

    def run(**options: Any) -> tuple[list[int], str | None]:
        [output] = engine.submit(
            prompt, SamplingParams(temperature=0.0, **{"max_tokens": 32, **options})
        )
        engine.run()
        return output.generated, output.finish_reason

    assert run() == (tokens[: last + 1], "stop")
    assert run(ignore_eos=True) == (tokens, "length")
    assert run(stop_token_ids=[tokens[0]]) == (tokens[:1], "stop")
    assert run(max_tokens=1, ignore_eos=True) == (tokens[:1], "length")
    generated, reason = run(max_tokens=1000, ignore_eos=True)
    assert (len(generated), reason) == (64 - 6, "length")


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(llama: Tiny) -> None:
    params = SamplingParams(seed=5, max_tokens=24, top_k=20)
    prompt, others = _prompt(9), [_prompt(20), _prompt(14)]
    engine = llama.engine()
    alone = _generate(engine, [prompt], params)[0]
    small = llama.engine(kv_cache_config={"max_tokens": 60})
    outputs = [small.submit(each, SamplingParams(max_tokens=24))[0] for each in others]
    output = small.submit(prompt, params)[0]
    small.run()
    assert output.generated == alone
    assert small.stats.preemptions > 0
    assert all(len(each.generated) == 24 for each in outputs)


def test_several_outputs_of_one_prompt(llama: Tiny) -> None:
    engine = llama.engine()
    outputs = engine.submit(_prompt(5), SamplingParams(n=3, seed=1, temperature=2.0, logprobs=2))
    assert len(outputs) == 3
    engine.run()
    assert len({tuple(output.generated) for output in outputs}) > 1
    assert all(
        token in logprobs
        for o in outputs
        for token, logprobs in zip(o.generated, o.logprobs, strict=True)
    )


def test_prompts_that_cannot_be_served_are_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="a prompt has 64 tokens and a sequence can have 64"):
        engine.submit(_prompt(64), GREEDY)
    with pytest.raises(UsageError, match="no tokens"):
        engine.submit([], GREEDY)
    with pytest.raises(UsageError, match="need a tokenizer"):
        engine.submit(_prompt(3), SamplingParams(stop="x"))
    for token in (-1, TINY["vocab_size"]):
        with pytest.raises(
            UsageError,
            match=f"a prompt has token {token}. Token ids go from 0 to {TINY['vocab_size'] - 1}$",
        ):
            engine.submit([1, token], GREEDY)
        with pytest.raises(UsageError, match=f"a prompt has token {token}"):
            engine.logits([1, token])
    with pytest.raises(UsageError, match="65 tokens"):
        engine.logits(_prompt(65))
    assert not engine.scheduler.busy

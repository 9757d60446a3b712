"""Outputs that go on behind tokens that they have got elsewhere are what they are in one piece."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from onboard import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from onboard.runtime.calls.outputs import Delta
from tests.support.runtime.tiny import Tiny
from tests.support.serving import speaking_model


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return speaking_model(tmp_path_factory.mktemp("speaking"))


def random_params(rng: random.Random) -> SamplingParams:
    held = rng.choice([None, {"regex": "[a-d ]{1,20}x"}, {"choice": ["the cat sat", "the dog"]}])
    return SamplingParams(
        max_tokens=rng.randint(2, 30),
        min_tokens=rng.choice([0, 2]),
        temperature=1.0,
        seed=rng.randrange(1000),
        stop=rng.choice([[], ["a"], ["at", " s"]]),
        ignore_eos=rng.random() < 0.5,
        n=rng.randint(1, 3),
        logprobs=rng.choice([None, 2]),
        include_stop_str_in_output=rng.random() < 0.5,
        repetition_penalty=rng.choice([1.0, 1.4]),
        frequency_penalty=rng.choice([0.0, 0.7]),
        structured_outputs=None if held is None else StructuredOutputs(**held),
    )


def of(deltas: list[Delta], index: int) -> list[Delta]:
    return [delta for delta in deltas if delta.index == index]


def told(deltas: list[Delta]) -> list[Any]:
    return [(each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in deltas]


def test_they_go_on_as_they_would_have(speaking: Tiny) -> None:
    """Each output is cut at a random place, some before their first token, some behind the last."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    limits = {"max_batch_size": 4, "max_seq_len": 256}
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "settings": limits}
    many = AsyncLLM.over(LLM(speaking.checkpoint, root=speaking.root, **options))

    async def check(params: SamplingParams) -> None:
        whole = [delta async for delta in many.stream("the dog", params, each_step=True)]
        lengths = [sum(len(each.token_ids) for each in of(whole, i)) for i in range(params.n)]
        cuts = [rng.choice([0, length, rng.randrange(64)]) for length in lengths]
        tokens = [[t for each in of(whole, i) for t in each.token_ids] for i in range(params.n)]
        had = [each[:cut] for each, cut in zip(tokens, cuts, strict=True)]
        rest = many.stream("the dog", params, generated=had, each_step=True)
        again = [delta async for delta in rest]
        for index in range(params.n):
            assert told(of(again, index)) == told(of(whole, index))
            for delta in of(again, index):
                assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)

    async def all_of_them() -> None:
        async with many:
            for _ in range(60):
                await check(random_params(rng))
            assert not many.thread.running

    asyncio.run(all_of_them())

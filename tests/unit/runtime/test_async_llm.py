"""Streams, many callers at once, and conversations: each as one call alone gives it."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from contextlib import aclosing
from typing import Any

import pytest
import torch

from onboard import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from onboard.errors import NotFiniteError, OnboardError, UsageError
from onboard.runtime.calls.outputs import Delta
from tests.support.runtime.paused import SECONDS, paused
from tests.support.runtime.tiny import Tiny, make_tiny, save_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the cat — naïve 日本"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if mood %} {{ mood }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "settings": {"max_batch_size": 4}}


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("speaking")
    size = save_tokenizer(folder / "tokenizer", TEXT)
    model = make_tiny(folder, vocab_size=size, eos_token_id=0)
    shutil.copytree(folder / "tokenizer", model.checkpoint, dirs_exist_ok=True)
    return model


@pytest.fixture(scope="module")
def llm(speaking: Tiny) -> LLM:
    made = LLM(speaking.checkpoint, root=speaking.root, **OPTIONS)
    made.engine.tokenizer.hf.chat_template = TEMPLATE
    return made


@pytest.fixture
def many(speaking: Tiny) -> AsyncLLM:
    return AsyncLLM(speaking.checkpoint, root=speaking.root, **OPTIONS)


def joined(deltas: list[Delta]) -> dict[int, tuple[str, list[int], Any]]:
    """Text, tokens and end of each output."""
    outputs: dict[int, tuple[str, list[int], Any]] = {}
    for each in deltas:
        text, tokens, end = outputs.get(each.index, ("", [], None))
        assert end is None, "news after the end"
        outputs[each.index] = (text + each.text, tokens + each.token_ids, each.finish_reason)
    return outputs


async def begun(many: AsyncLLM, *calls: asyncio.Future[Any]) -> None:
    """Wait until the engine has the calls' requests, or they have ended already."""
    while len(many.thread.running) < len(calls) and not any(call.done() for call in calls):
        await asyncio.sleep(0.001)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 30),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1000),
        stop=rng.choice([[], ["a"], ["cat", " s"], ["日"]]),
        ignore_eos=rng.random() < 0.5,
        n=rng.randint(1, 3),
        logprobs=rng.choice([None, 2]),
        include_stop_str_in_output=rng.random() < 0.5,
        repetition_penalty=rng.choice([1.0, 1.4]),
    )


def test_a_stream_is_the_whole_in_pieces(llm: LLM) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(25):
        params = random_params(rng)
        whole = llm.generate(["the dog"], params)[0]
        outputs = joined(list(llm.stream("the dog", params)))
        assert [outputs[index] for index in range(params.n)] == [
            (each.text, each.token_ids, each.finish_reason) for each in whole.outputs
        ]


def test_who_leaves_a_stream_cancels_the_rest(llm: LLM) -> None:
    stream = llm.stream("the dog", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    with pytest.raises(UsageError, match="while it generates"):
        llm.generate(["the cat"])
    stream.close()
    assert not llm.engine.scheduler.busy
    assert llm.generate(["the cat"], SamplingParams(max_tokens=2))[0].token_ids


def test_grammars_are_read_beside_the_engine(many: AsyncLLM, monkeypatch: Any) -> None:
    """While a grammar is read, which lasts here until another request has ended, others run."""
    began, done, threads = threading.Event(), threading.Event(), []
    right = many.llm.engine.grammars.matcher

    def slow(wanted: Any) -> Any:
        if wanted is not None:
            threads.append(threading.current_thread())
            began.set()
            assert done.wait(SECONDS)
        return right(wanted)

    monkeypatch.setattr(many.llm.engine.grammars, "matcher", slow)
    choice = SamplingParams(structured_outputs=StructuredOutputs(choice=["cat"]), n=2)

    async def both() -> Any:
        async with many:
            slowly = asyncio.create_task(many.generate("the", choice))
            await asyncio.to_thread(began.wait, SECONDS)
            await many.generate("the dog", SamplingParams(max_tokens=5))
            done.set()
            return await slowly

    assert [each.text for each in asyncio.run(both()).outputs] == ["cat", "cat"]
    assert [thread is many.thread._thread for thread in threads] == [False]


def test_many_callers_get_what_they_would_alone(llm: LLM, many: AsyncLLM) -> None:
    """Random requests that come at random times, some with faults, some cancelled."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = ["the dog", "the cat sat", "on the mat", "naïve 日本"]
    cases = [(rng.choice(prompts), random_params(rng), rng.random()) for _ in range(40)]

    async def one(prompt: str, params: SamplingParams, kind: float) -> Any:
        await asyncio.sleep(rng.random() * 0.3)
        if kind < 0.1:
            with pytest.raises(UsageError):
                await many.generate([10**7], params)
            return None
        if kind < 0.3:
            async with aclosing(many.stream(prompt, params)) as stream:
                async for _ in stream:
                    return None
        if kind < 0.6:
            return joined([delta async for delta in many.stream(prompt, params)])
        output = await many.generate(prompt, params)
        return {
            index: (each.text, each.token_ids, each.finish_reason)
            for index, each in enumerate(output.outputs)
        }

    async def everyone() -> list[Any]:
        async with many:
            found = await asyncio.gather(*(one(*case) for case in cases))
            while many.thread.running:
                await asyncio.sleep(0.01)
            assert not many.llm.engine.scheduler.busy
            return found

    found = asyncio.run(everyone())
    for (prompt, params, _), outputs in zip(cases, found, strict=True):
        if outputs is not None:
            alone = llm.generate([prompt], params)[0]
            for index, each in enumerate(alone.outputs):
                if params.temperature == 0.0 or params.seed is not None:
                    assert outputs[index] == (each.text, each.token_ids, each.finish_reason)
    assert sum(outputs is not None for outputs in found) > 5


def test_a_step_that_fails_is_told_to_all_that_run(many: AsyncLLM) -> None:
    engine = many.llm.engine
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    def broken() -> Any:
        raise NotFiniteError("the logits are not finite")

    async def main() -> None:
        with paused(engine, after=3):
            calls = [
                asyncio.ensure_future(many.generate(text, params))
                for text in ("the dog", "the cat")
            ]
            await begun(many, *calls)
            engine.step = broken  # type: ignore[method-assign]
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, NotFiniteError) for each in results)
        again = await many.generate("the dog", SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(again.token_ids) == 3
        await many.close()

    asyncio.run(main())


def test_closing_waits_and_then_cancels(many: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        quick = asyncio.ensure_future(many.generate("the dog", params))
        await begun(many, quick)
        assert await many.close()
        assert (await quick).outputs
        with pytest.raises(UsageError, match="being closed"):
            await many.generate("the dog")

    asyncio.run(main())
    assert not [each for each in threading.enumerate() if each is many.thread._thread]


def test_closing_at_once_tells_why(many: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True, n=3)
        with paused(many.llm.engine, after=3):
            long = asyncio.ensure_future(many.generate("the dog", params))
            await begun(many, long)
            assert not await many.close(timeout=0)
            with pytest.raises(OnboardError, match="closed before the output had ended"):
                await long

    asyncio.run(main())


def test_a_conversation_is_what_the_template_writes(llm: LLM, many: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    written = llm.engine.tokenizer.encode_plain("<user>the cat1 tools calm<assistant>")
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    expected = llm.generate([written], params)[0].token_ids
    given: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"mood": "calm"},
    }
    (answer,) = llm.chat(messages, params, **given)
    assert answer.prompt_token_ids == written
    assert answer.token_ids == expected
    both = llm.chat([messages, messages], params, **given)
    assert [each.token_ids for each in both] == [expected] * 2

    async def main() -> list[int]:
        async with many:
            many.llm.engine.tokenizer.hf.chat_template = TEMPLATE
            return (await many.chat(messages, params, **given)).token_ids

    assert asyncio.run(main()) == expected


def test_without_a_template_there_is_no_chat(speaking: Tiny) -> None:
    plain = LLM(speaking.checkpoint, root=speaking.root, **OPTIONS)
    with pytest.raises(UsageError, match="no chat template"):
        plain.chat([{"role": "user", "content": "the cat"}])


def test_prompt_scores_beside_running_requests(llm: LLM, many: AsyncLLM) -> None:
    ids = llm.encode("the dog sat on the mat")
    wanted = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    long = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    alone = [llm.generate([ids], each)[0] for each in (wanted, long)]

    async def main() -> list[Any]:
        async with many:
            running = asyncio.ensure_future(many.generate(ids, long))
            await begun(many, running)
            return [await many.generate(ids, wanted), await running]

    for one, other in zip(alone, asyncio.run(main()), strict=True):
        assert one.token_ids == other.token_ids
    scores = alone[0].prompt_logprobs
    assert scores is not None
    found = torch.tensor([next(iter(each.values())) for each in scores if each is not None])
    expected = llm.logits(ids).double().log_softmax(-1)
    assert torch.allclose(found.double(), expected[torch.arange(len(ids) - 1), ids[1:]], atol=1e-4)


def test_structured_outputs_are_streamed(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["the mat"]), max_tokens=20)
    pieces = [delta.text for delta in llm.stream("the cat", params)]
    assert "".join(pieces) == "the mat"
    assert len(pieces) > 1

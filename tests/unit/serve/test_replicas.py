"""A front before several replicas: what a client gets when replicas are lost is what one server
gives.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from onboard.serve.app import create_app
from onboard.serve.replicas.front import create_front
from onboard.serve.replicas.passed_on import Asked, Head, Part, ReplicaLostError
from onboard.serve.replicas.prefix_routes import PrefixRoutes, prompt_blocks
from onboard.serve.replicas.replica_call import ReplicaCall
from onboard.serve.replicas.sending import Sender
from onboard.serve.request_scope import RequestScope, in_scope
from onboard.serve.serve_settings import ServeSettings
from onboard.serve.server import load_service
from onboard.serve.service import Service
from tests.support.runtime.tiny import Tiny
from tests.support.serving import speaking_model


class Unreliable:
    """Replicas in this process, which are lost in the middle of requests: each request loses up to
    `most` of them, behind some parts of its answer.
    """

    def __init__(self, services: list[Service], rng: random.Random, most: int) -> None:
        self.apps = {f"r{i}": create_app(service) for i, service in enumerate(services)}
        self.live = set(self.apps)
        self.rng, self.most = rng, most
        self.running = 0
        self.losses: Counter[str] = Counter()
        """Of each request."""
        self.asked: list[str] = []

    async def ask(self, asked: Asked, to: str | None) -> AsyncGenerator[Head | Part, None]:
        assert to is not None
        self.asked.append(to)
        self.running += 1
        try:
            left = self.rng.randrange(6) if self.most < 4 else 0
            async with aclosing(ReplicaCall(self.apps[to], asked, to).parts()) as parts:
                async for part in parts:
                    left -= 1
                    if left < 0 and self.losses[asked.key] < self.most:
                        self.losses[asked.key] += 1
                        raise ReplicaLostError
                    yield part
        finally:
            self.running -= 1


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return speaking_model(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module")
def services(speaking: Tiny) -> Iterator[list[Service]]:
    limits = {"max_batch_size": 8, "max_seq_len": 1024}
    made = [
        load_service(
            str(speaking.checkpoint),
            ServeSettings(names=["tiny"]),
            root=speaking.root,
            device="cpu",
            dtype="float32",
            settings=limits,
        )
        for _ in range(2)
    ]
    yield made
    for service in made:
        asyncio.run(service.llm.close(timeout=0))
        service.close()


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    common = {"max_tokens": rng.randint(1, 24), "seed": rng.randrange(99), "temperature": 1.0}
    messages = [{"role": "user", "content": "the cat sat"}]
    stream = {"stream": rng.random() < 0.8}
    kind = rng.randrange(5)
    if kind == 0:
        prompt = rng.choice(["the dog", ["the cat", "on the mat"]])
        more = {"prompt": prompt, "n": rng.randint(1, 2), "logprobs": rng.choice([None, 1])}
        return "/v1/completions", {**common, **more, **stream, "echo": rng.random() < 0.3}
    if kind == 1:
        more = {"messages": messages, "n": rng.randint(1, 3), "stop": rng.choice([None, "s"])}
        more |= {"tools": [TOOL], "stream_options": {"include_usage": True}}
        return "/v1/chat/completions", {**common, **more, **stream}
    if kind == 2:
        size = common["max_tokens"]
        return "/v1/responses", {
            "input": "the dog",
            "max_output_tokens": size,
            "temperature": 0,
            **stream,
        }
    if kind == 3:
        more = {"messages": messages, "temperature": 0, "max_tokens": common["max_tokens"]}
        return "/v1/messages", {**more, **stream}
    return "/v1/embeddings", {"input": ["the dog", "the cat"]}


_NAMES = ("id", "item_id", "call_id", "created", "created_at", "cached_tokens")


def meaning(value: Any) -> Any:
    """A document without what differs between two answers to the same request."""
    if isinstance(value, dict):
        return {key: meaning(each) for key, each in value.items() if key not in _NAMES}
    return [meaning(each) for each in value] if isinstance(value, list) else value


def is_same(one: Any, other: Any) -> bool:
    """Whether two documents are equal, numbers nearly: batches round them in ways of their own."""
    if isinstance(one, float):
        return isinstance(other, float) and abs(one - other) < 1e-4
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def events_of(text: str) -> list[Any]:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def told(answer: httpx.Response) -> Any:
    """What an answer says; of a stream the events of each of its outputs in order."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return meaning(answer.json())
    events = events_of(answer.text)
    streams: dict[Any, list[Any]] = {}
    for each in events:
        choices = each.get("choices") if isinstance(each, dict) else None
        streams.setdefault(choices[0]["index"] if choices else None, []).append(meaning(each))
    return streams


def one_name(answer: httpx.Response) -> bool:
    """Whether all events of a stream have one name and one time, and numbers without a gap."""
    events = [each for each in events_of(answer.text) if isinstance(each, dict)]
    numbers = [each["sequence_number"] for each in events if "sequence_number" in each]
    names = {(each["id"], each["created"]) for each in events if "choices" in each}
    return len(names) <= 1 and numbers == list(range(len(numbers)))


def test_no_request_is_lost_with_its_replica(services: list[Service]) -> None:
    """Random requests of every interface, cut off at random parts: each answer is the single
    run's.
    """
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    replicas = Unreliable(services, rng, 3)
    front = create_front(Sender(replicas), ServeSettings(names=["tiny"]))
    cases = [random_request(rng) for _ in range(18)]

    async def both() -> None:
        async with client_of(front) as many, client_of(create_app(services[0])) as single:
            for start in range(0, len(cases), 6):
                some = cases[start : start + 6]
                found = await asyncio.gather(*(many.post(path, json=body) for path, body in some))
                for (path, body), answer in zip(some, found, strict=True):
                    with in_scope(RequestScope(done=lambda *_: None)):  # events of a step each
                        expected = await single.post(path, json=body)
                    assert answer.status_code == expected.status_code == 200, answer.text
                    assert is_same(told(answer), told(expected)), (
                        path,
                        body,
                        told(answer),
                        told(expected),
                    )
                    assert one_name(answer), answer.text

    asyncio.run(both())
    assert replicas.losses.total() > 4, "nothing was lost"
    assert not replicas.running
    assert not any(service.llm.thread.running for service in services)


def test_a_request_that_ends_every_replica_is_refused(services: list[Service]) -> None:
    replicas = Unreliable(services, random.Random(0), 4)
    front = create_front(Sender(replicas), ServeSettings(names=["tiny"]))

    async def ask() -> httpx.Response:
        async with client_of(front) as client:
            return await client.post("/v1/completions", json={"prompt": "the cat"})

    answer = asyncio.run(ask())
    assert answer.status_code == 503
    assert "were lost" in answer.json()["error"]["message"]
    assert len(replicas.asked) == 4


def test_a_front_says_what_one_server_says(services: list[Service]) -> None:
    """Refusals, models, descriptions; metrics say whose they are."""
    replicas = Unreliable(services, random.Random(0), 0)
    front = create_front(Sender(replicas), ServeSettings(names=["tiny"]))
    wrong = {"prompt": "the cat", "max_tokens": "many"}

    async def check() -> None:
        async with client_of(front) as many, client_of(create_app(services[0])) as single:
            for path in ("/v1/models", "/v1/models/tiny", "/version", "/openapi.json", "/v1/none"):
                one, other = await many.get(path), await single.get(path)
                assert one.status_code == other.status_code, path
                assert meaning(one.json()) == meaning(other.json()), path
            for path in ("/v1/completions", "/v1/messages", "/tokenize", "/v1/none"):
                one, other = await many.post(path, json=wrong), await single.post(path, json=wrong)
                assert (one.status_code, one.json()) == (other.status_code, other.json()), path
            text = (await many.get("/metrics")).text
            assert {
                line.split('replica="')[1][:2] for line in text.splitlines() if "replica=" in line
            } == {"r0", "r1"}
            assert text.count("# TYPE vllm:num_requests_running gauge") == 1
            replicas.live.clear()
            assert (await many.get("/health")).status_code == 503

    asyncio.run(check())


def test_who_goes_away_is_not_computed_for(services: list[Service]) -> None:
    replicas = Unreliable(services, random.Random(0), 0)
    sender = Sender(replicas)

    async def leave() -> None:
        body = {"prompt": "the cat", "max_tokens": 900, "ignore_eos": True, "stream": True}
        asked = Asked("POST", "/v1/completions", json.dumps(body).encode(), "key", 0)
        async with aclosing(sender.answer(asked)) as parts:
            assert isinstance(await anext(parts), Head)
            assert (await anext(parts)).startswith(b"data: ")
            assert sum(sender.routes.loads.values()) == 1
        while any(service.llm.thread.running for service in services):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert not replicas.running
    assert not sender.routes.loads


def body(*texts: str) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"stream": True, "messages": messages, "model": "tiny"}).encode()


def test_a_conversation_goes_to_the_replica_that_has_it() -> None:
    routes, live = PrefixRoutes(), {"a", "b", "c"}
    system, turns = "s" * 600, ["t" * 600, "u" * 600]
    first = prompt_blocks(body(system, turns[0]))
    name = routes.choose(first, live)
    assert name is not None
    routes.begun(name, first)
    routes.ended(name)
    more = prompt_blocks(body(system, *turns))
    assert more[: len(first) - 1] == first[:-1]
    assert {routes.choose(more, live) for _ in range(20)} == {name}
    others = {routes.choose(prompt_blocks(body("x" * 600)), live) for _ in range(200)}
    assert others == live, "a prompt that nobody has had goes anywhere"
    for _ in range(9):  # it is too busy now
        routes.begun(name, more)
    assert name not in {routes.choose(more, live) for _ in range(20)}
    assert routes.choose(more, {name}) == name
    assert routes.choose(more, set()) is None


def test_the_most_of_a_prompt_decides_then_the_load() -> None:
    routes, live = PrefixRoutes(), {"a", "b"}
    short, long = prompt_blocks(body("s" * 900)), prompt_blocks(body("s" * 900 + "t" * 900))
    routes.begun("a", short)
    routes.begun("b", long)
    assert routes.choose(long, live) == "b"
    routes.ended("b")
    assert routes.choose(prompt_blocks(body("z" * 999)), live) == "b", "the least busy one"


@pytest.mark.parametrize("junk", [b"", b"[]", b"nul", b'{"messages": 3}', b"\xff\xfe", b'"' * 9])
def test_what_is_no_request_goes_anywhere(junk: bytes) -> None:
    assert prompt_blocks(junk) == []

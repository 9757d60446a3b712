"""OpenAI's own client against a server: completions and chat, whole and streamed, right and wrong."""

from __future__ import annotations

import concurrent.futures
import json
import random
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from onboard import SamplingParams
from onboard.serve.service import Service
from tests.support.runtime.paused import SECONDS, paused, wait_until
from tests.support.serving import client_of_openai, served, speaking_model

if TYPE_CHECKING:
    from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
USER = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    with served(speaking_model(tmp_path_factory.mktemp("served"))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: tuple[str, Service]) -> OpenAI:
    return client_of_openai(server[0])


@pytest.fixture(scope="module")
def service(server: tuple[str, Service]) -> Service:
    return server[1]


def alone(service: Service, prompt: list[int], **options: Any) -> Any:
    """The same prompt through the engine's own thread, without the server."""
    import asyncio

    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **options})
    return asyncio.run(service.llm.generate(prompt, params))


def test_a_completion_is_the_engines(client: OpenAI, service: Service) -> None:
    ids = service.llm.llm.encode("the dog")
    expected = alone(service, ids)
    for prompt in ("the dog", ids):
        found = client.completions.create(prompt=prompt, **GREEDY)
        assert found.choices[0].text == expected.text
        assert found.choices[0].finish_reason == expected.finish_reason
        assert found.usage.prompt_tokens == len(ids)
        assert found.usage.completion_tokens == len(expected.token_ids)
    stream = client.completions.create(
        prompt="the dog", stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected.text
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)


def test_several_prompts_and_outputs(client: OpenAI) -> None:
    prompts = ["the dog", "the cat sat"]
    options = {"model": "tiny", "max_tokens": 6, "n": 3, "seed": 7, "temperature": 1.0}
    whole = client.completions.create(prompt=prompts, **options)
    assert [each.index for each in whole.choices] == list(range(6))
    assert len({each.text for each in whole.choices[:3]}) > 1
    texts = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(prompt=prompts, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [each.text for each in whole.choices]


def test_log_probabilities_and_echo(client: OpenAI, service: Service) -> None:
    """As evaluation harnesses ask: of the prompt's own tokens, without more text."""
    ids = service.llm.llm.encode("the dog sat on the mat")
    found = client.completions.create(
        model="tiny", prompt=[ids], max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    scores = found.choices[0].logprobs
    assert found.choices[0].text == "the dog sat on the mat"
    assert scores.token_logprobs[0] is None
    expected = alone(service, ids, max_tokens=1, prompt_logprobs=1).prompt_logprobs
    for place in range(1, len(ids)):
        assert scores.token_logprobs[place] == pytest.approx(expected[place][ids[place]], abs=1e-5)
    assert "".join(scores.tokens) == found.choices[0].text
    _check_places(found.choices[0])
    longer = client.completions.create(
        model="tiny", prompt=[ids], max_tokens=3, echo=True, logprobs=2, temperature=0
    )
    assert len(longer.choices[0].logprobs.tokens) == len(ids) + longer.usage.completion_tokens


def _check_places(choice: Any) -> None:
    """Each token's text lies where it is said to, and special ones are not in the text."""
    scores = choice.logprobs
    for word, place in zip(scores.tokens, scores.text_offset, strict=True):
        if not word.startswith("<") and "\N{REPLACEMENT CHARACTER}" not in word:
            assert choice.text[place:].startswith(word), (word, place, choice.text)


def test_places_in_a_text_are_those_without_special_tokens(
    client: OpenAI, service: Service
) -> None:
    special = service.tokenizer.hf.all_special_ids[0]
    ids = [special, *service.llm.llm.encode("the dog sat"), special, *service.llm.llm.encode("on")]
    options = {"model": "tiny", "prompt": [ids], "max_tokens": 5, "logprobs": 1, "temperature": 0}
    found = client.completions.create(echo=True, **options).choices[0]
    assert found.logprobs.text_offset[:2] == [0, 0]
    _check_places(found)
    _check_places(client.completions.create(**options).choices[0])
    places = []
    for chunk in client.completions.create(echo=True, stream=True, **options):
        places += chunk.choices[0].logprobs.text_offset
    assert places == found.logprobs.text_offset


def test_a_conversation_is_the_templates(client: OpenAI, service: Service) -> None:
    written = service.llm.llm.engine.tokenizer.encode_plain("<user>the cat[calm]<assistant>")
    expected = alone(service, written, skip_special_tokens=False)
    options = {**GREEDY, "extra_body": {"chat_template_kwargs": {"mood": "calm"}}}
    found = client.chat.completions.create(messages=USER, **options)
    assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == len(written)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
    again = client.chat.completions.create(messages=parts, **options)
    assert again.choices[0].message.content == expected.text
    chunks = list(client.chat.completions.create(messages=USER, stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == found.choices[0].finish_reason


def test_chat_log_probabilities(client: OpenAI) -> None:
    options = {**GREEDY, "messages": USER, "logprobs": True, "top_logprobs": 3}
    found = client.chat.completions.create(**options)
    content = found.choices[0].logprobs.content
    assert len(content) == found.usage.completion_tokens
    for each in content:
        assert len(each.top_logprobs) == 3
        assert each.logprob == max(top.logprob for top in each.top_logprobs)
    streamed = [
        token
        for chunk in client.chat.completions.create(stream=True, **options)
        for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [each.logprob for each in streamed] == pytest.approx([e.logprob for e in content])


def test_bytes_of_a_part_of_a_character_are_the_tokens(client: OpenAI, service: Service) -> None:
    part = "\N{REPLACEMENT CHARACTER}"
    parts = [t for t in range(service.tokenizer.hf.vocab_size) if service.token_text(t) == part]
    bias = {str(token): 100 for token in parts}
    options = {**GREEDY, "messages": USER, "logprobs": True, "logit_bias": bias}
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [each.token for each in content] == [part] * len(content)
    assert all(bytes(each.bytes) in map(service.tokenizer.bytes_of, parts) for each in content)
    assert not any(part.encode() == bytes(each.bytes) for each in content)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_required_tool_is_called(client: OpenAI, choice: Any) -> None:
    options = {"model": "tiny", "messages": USER, "tools": [WEATHER], "tool_choice": choice}
    options["parallel_tool_calls"] = False  # a random model would call until its tokens end
    found = client.chat.completions.create(max_tokens=300, seed=1, **options)
    assert found.choices[0].finish_reason == "tool_calls"
    calls = found.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.function.name == "weather"
        assert 0 <= json.loads(call.function.arguments)["days"] <= 9
    chunks = list(client.chat.completions.create(max_tokens=300, seed=1, stream=True, **options))
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    told: dict[int, str] = {}
    for delta in deltas:
        told[delta.index] = told.get(delta.index, "") + delta.function.arguments
    expected = [json.loads(call.function.arguments) for call in calls]
    assert [json.loads(each) for each in told.values()] == expected
    assert [delta.function.name for delta in deltas if delta.id] == ["weather"] * len(calls)
    assert len(deltas) > len(calls), "not in pieces"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_result_of_a_tool_goes_back(client: OpenAI, service: Service) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"days": 3}'},
    }
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "yes"},
    ]
    found = client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY)
    text = '<user>the cat<assistant><tool_call>{"days": 3}</tool_call><tool>yes<assistant>'
    tools = "<tools>" + json.dumps([WEATHER])
    written = service.llm.llm.engine.tokenizer.encode_plain(tools + text)
    assert found.usage.prompt_tokens == len(written)


def test_the_answer_has_the_shape_that_is_asked_for(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    options = {"model": "tiny", "messages": USER, "max_tokens": 200, "seed": 3}
    found = client.chat.completions.create(response_format=wanted, **options)
    assert list(json.loads(found.choices[0].message.content)) == ["ok"]
    expression = {"extra_body": {"structured_outputs": {"regex": "(yes|no){2}"}}}
    found = client.chat.completions.create(**options, **expression)
    assert re.fullmatch("(yes|no){2}", found.choices[0].message.content)


def _shaped(schema: Any) -> dict[str, Any]:
    named = {} if schema is None else {"json_schema": {"name": "answer", "schema": schema}}
    return {"response_format": {"type": "json_schema", **named}}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", {"prompt": "a", "model": "other"}, 404, "not served here"),
        ("completions", {"prompt": ""}, 400, "no tokens|no prompt"),
        ("completions", {"prompt": []}, 400, "no prompt"),
        ("completions", {"prompt": [10**9]}, 400, "token 1000000000"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "max_tokens": "many"}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "n": 99}, 400, "outputs"),
        ("completions", {"prompt": "a", "logprobs": 10**9}, 400, "logprobs"),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, "in between"),
        ("completions", {"prompt": "the " * 2000}, 400, "can have"),
        ("chat/completions", {"messages": []}, 400, "no message"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        ("chat/completions", {"messages": USER, "tool_choice": "required"}, 400, "no"),
        ("chat/completions", {"messages": USER, "tool_choice": "nobody"}, 400, "nobody.*required"),
        ("chat/completions", {"messages": USER, "top_logprobs": 2}, 400, "with logprobs alone"),
        ("chat/completions", {"messages": USER, "response_format": {"type": "xml"}}, 400, "xml"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "image_url",
        ),
        (
            "chat/completions",
            {"messages": USER, "structured_outputs": {"regex": "(["}},
            400,
            "not understood",
        ),
        ("nothing", {}, 404, "Not Found"),
        ("completions", {"prompt": ["a", [8]]}, 400, r"prompt: Input should be one of str, list\["),
        (
            "completions",
            {"prompt": "a", "stop": {}},
            400,
            r"stop: Input should be one of str, list",
        ),
        ("completions", {"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias.a: Input"),
        ("chat/completions", {"messages": USER, **_shaped(None)}, 400, "has no json_schema"),
        ("chat/completions", {"messages": USER, **_shaped(True)}, 400, "schema is no object"),
        (
            "chat/completions",
            {"messages": USER, **_shaped({"type": "words"})},
            400,
            "^json_schema is not understood.*words",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_refused(
    server: tuple[str, Service],
    path: str,
    body: dict[str, Any],
    status: int,
    words: str,
    stream: bool,
) -> None:
    answer = httpx.post(f"{server[0]}/v1/{path}", json={**body, "stream": stream}, timeout=SECONDS)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert re.search(words, error["message"])
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"[" * 100_000, b'{"prompt": "\\ud800"}', b"\xff\xfe", b"null"]
)
def test_bodies_that_are_no_request(server: tuple[str, Service], body: bytes) -> None:
    for path in ("completions", "chat/completions"):
        answer = httpx.post(f"{server[0]}/v1/{path}", content=body, timeout=SECONDS)
        assert answer.status_code == 400, answer.text
        assert "error" in answer.json()


def test_a_body_that_is_too_long(server: tuple[str, Service]) -> None:
    body = b'{"prompt": "' + b"a" * (9 << 20) + b'"}'
    assert (
        httpx.post(f"{server[0]}/v1/completions", content=body, timeout=SECONDS).status_code == 413
    )


@contextmanager
def asked(address: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Ask for a completion, by a connection that ends with the block."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), timeout=SECONDS) as connection:
        connection.sendall(head.encode() + content)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_is_not_computed_for(
    server: tuple[str, Service], service: Service, stream: bool
) -> None:
    """The engine stands still meanwhile: the output cannot have ended of itself."""
    body = {"prompt": "the cat", "max_tokens": 900, "ignore_eos": True, "n": 8, "stream": stream}
    engine, thread = service.llm.llm.engine, service.llm.thread
    before = engine.stats.cancelled
    with paused(engine, after=20):
        with asked(server[0], body) as connection:
            wait_until(lambda: thread.running)
            if stream:
                assert connection.recv(16)
        wait_until(lambda: not thread.running)
        assert engine.stats.cancelled == before + 8


def test_many_clients_get_what_they_would_alone(client: OpenAI, service: Service) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    texts = ["the cat", "the dog sat", "on the mat", "yes", "the cat sat on the dog"]
    cases = [(rng.choice(texts), rng.randint(1, 30), rng.random() < 0.5) for _ in range(60)]

    def one(case: tuple[str, int, bool]) -> str:
        text, length, stream = case
        options = {**GREEDY, "max_tokens": length}
        found: Any = client.completions.create(prompt=text, stream=stream, **options)
        return "".join(c.choices[0].text for c in found) if stream else found.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        found = list(pool.map(one, cases))
    for (text, length, _), answer in zip(cases, found, strict=True):
        expected = alone(service, service.llm.llm.encode(text), max_tokens=length)
        assert answer == expected.text


def test_facts_of_the_server(client: OpenAI, server: tuple[str, Service]) -> None:
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{server[0]}/health", timeout=SECONDS).status_code == 200
    assert httpx.get(f"{server[0]}/version", timeout=SECONDS).json()["version"]
    client.completions.create(prompt="the cat", extra_body={"ignore_eos": True}, **GREEDY)
    text = httpx.get(f"{server[0]}/metrics", timeout=SECONDS).text
    for name in (
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        'vllm:request_success_total{finished_reason="length"',
    ):
        assert name in text


def test_a_key_and_a_limit(tmp_path: Any) -> None:
    with served(speaking_model(tmp_path), api_keys=["sesame"], max_running=1) as (address, service):
        url = f"{address}/v1/completions"
        body = {"prompt": "the cat", "max_tokens": 9, "ignore_eos": True}
        assert httpx.post(url, json=body, timeout=SECONDS).status_code == 401
        wrong = {"Authorization": "Bearer open"}
        assert httpx.post(url, json=body, headers=wrong, timeout=SECONDS).status_code == 401
        assert httpx.get(f"{address}/health", timeout=SECONDS).status_code == 200
        key = {"Authorization": "Bearer sesame"}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with paused(service.llm.llm.engine):
                running = pool.submit(httpx.post, url, json=body, headers=key, timeout=SECONDS)
                wait_until(lambda: service.llm.thread.running)
                other = {"x-api-key": "sesame"}
                refused = httpx.post(url, json=body, headers=other, timeout=SECONDS)
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            assert running.result().status_code == 200

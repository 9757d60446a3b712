"""What further clients send: choices among tools, items of agents, and streams that fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from onboard.errors import NotFiniteError
from onboard.serve.service import Service
from tests.support.runtime.paused import SECONDS, paused, wait_until
from tests.support.serving import client_of_anthropic, client_of_openai, served, speaking_model

USER: Any = [{"role": "user", "content": "the cat"}]
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    with served(speaking_model(tmp_path_factory.mktemp("served"))) as found:
        yield found


def post(server: tuple[str, Service], path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server[0]}{path}", json=body, timeout=SECONDS)


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": EMPTY}}


def test_prompts_of_a_request_run_at_once(server: tuple[str, Service]) -> None:
    """The engine stands still until it has all of them."""
    llm = server[1].llm
    body = {"prompt": ["the cat", "the dog", "yes"], "max_tokens": 3, "temperature": 0}
    found: list[httpx.Response] = []
    with paused(llm.llm.engine):
        caller = threading.Thread(
            target=lambda: found.append(post(server, "/v1/completions", body))
        )
        caller.start()
        wait_until(lambda: len(llm.thread.running) == 3)
    caller.join(SECONDS)
    together = [choice["text"] for choice in found[0].json()["choices"]]
    alone = [
        post(server, "/v1/completions", body | {"prompt": each}).json()["choices"][0]["text"]
        for each in body["prompt"]  # type: ignore[attr-defined]
    ]
    assert together == alone


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_some_of_the_tools_are_allowed(server: tuple[str, Service], path: str) -> None:
    """Of three tools an answer has to call one of two: it does, whatever is drawn."""
    names = ["weather", "time", "place"]
    allowed: dict[str, Any] = {"mode": "required"}
    body: dict[str, Any] = {"parallel_tool_calls": False}
    if path == "/v1/responses":
        tools = [{"type": "function", "name": each, "parameters": EMPTY} for each in names]
        allowed["tools"] = [{"type": "function", "name": each} for each in names[1:]]
        choice = {"type": "allowed_tools", **allowed}
        body |= {"input": "the cat", "max_output_tokens": 300}
    else:
        tools = [function(each) for each in names]
        allowed["tools"] = [function(each) for each in names[1:]]
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        body |= {"messages": USER, "max_tokens": 300}
    body |= {"tools": tools, "tool_choice": choice}
    for _ in range(6):
        document = post(server, path, body).json()
        if path == "/v1/responses":
            called = [each["name"] for each in document["output"]]
        else:
            calls = document["choices"][0]["message"]["tool_calls"]
            called = [each["function"]["name"] for each in calls]
        assert set(called) <= set(names[1:])
        assert called


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": 7},
        {"type": "function", "function": {"name": "unknown"}},
        {"type": "function"},
        "sometimes",
    ],
)
def test_choices_that_no_tool_can_meet(server: tuple[str, Service], choice: Any) -> None:
    body = {"messages": USER, "tools": [function("weather")], "tool_choice": choice}
    found = post(server, "/v1/chat/completions", body)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "tool_choice"


def test_items_of_other_servers_tools(server: tuple[str, Service]) -> None:
    """A conversation that began elsewhere goes on: what the model can read, it gets."""
    service = server[1]
    items = [
        {"type": "message", "role": "user", "content": "the cat"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "yes"},
    ]
    body: dict[str, Any] = {"input": items, "max_output_tokens": 1}
    found = post(server, "/v1/responses", body).json()
    call = f"<assistant><tool_call>{json.dumps({'input': '*** Begin'})}</tool_call>"
    written = service.llm.llm.engine.tokenizer.encode_plain(
        f"<user>the cat{call}<tool>yes<assistant>"
    )
    assert found["usage"]["input_tokens"] == len(written)
    for field in ("conversation", "previous_response_id"):
        assert post(server, "/v1/responses", body | {field: "x"}).status_code == 400


def test_parts_of_a_result_that_are_no_text_are_named(server: tuple[str, Service]) -> None:
    parts = [{"type": "text", "text": "sun"}, {"type": "image", "source": {}}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": parts}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    messages = [
        *USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    counted = post(server, "/v1/messages/count_tokens", {"messages": messages}).json()
    written = server[1].llm.llm.engine.tokenizer.encode_plain(
        "<user>the cat<assistant><tool_call>{}</tool_call><tool>sun\n[image]<assistant>"
    )
    assert counted["input_tokens"] == len(written)


def test_both_clients_list_the_models(server: tuple[str, Service]) -> None:
    theirs = client_of_openai(server[0])
    claude = client_of_anthropic(server[0])
    assert [each.id for each in theirs.models.list()] == ["tiny"]
    [model] = claude.models.list()
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")


def test_tokens_from_the_cache_are_counted(server: tuple[str, Service]) -> None:
    theirs = client_of_openai(server[0])
    prompt = list(range(1, 201))
    for time in range(2):
        found = theirs.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        cached = found.usage.prompt_tokens_details.cached_tokens
        assert (cached > 100) == bool(time)
        assert cached < len(prompt)
    text = httpx.get(f"{server[0]}/metrics", timeout=SECONDS).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    label = '{model_name="tiny"}'
    hits = float(values[f"vllm:prefix_cache_hits_total{label}"])
    assert cached <= hits < float(values[f"vllm:prefix_cache_queries_total{label}"])
    for name in ("request_params_n", "request_params_max_tokens", "request_decode_time_seconds",
                 "request_time_per_output_token_seconds", "inter_token_latency_seconds"):  # fmt: skip
        assert f"vllm:{name}_count{label}" in values


STREAMS = {
    "/v1/completions": {"prompt": "the cat", "max_tokens": 900},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 900},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 900},
    "/v1/messages": {"messages": USER, "max_tokens": 900},
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_fails_says_so_in_its_own_words(
    server: tuple[str, Service], path: str
) -> None:
    """The engine fails after some steps: the last event tells, in the form of the interface."""
    engine = server[1].llm.llm.engine
    right, left = engine.step, 20

    def step() -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise NotFiniteError("the logits are not finite")
        return right()

    body = {**STREAMS[path], "stream": True, "temperature": 0}  # never the end-of-text token
    try:
        engine.step = step  # type: ignore[method-assign]
        text = post(server, path, body).text
    finally:
        engine.step = right  # type: ignore[method-assign]
    last = [part for part in text.split("\n\n") if part][-1].splitlines()
    document = json.loads(last[-1].removeprefix("data: "))
    if path == "/v1/responses":
        assert last[0] == "event: response.failed"
        assert document["response"]["status"] == "failed"
        document = document["response"]
    if path == "/v1/messages":
        assert last[0] == "event: error"
        assert (document["type"], document["error"]["type"]) == ("error", "api_error")
    assert "not finite" in document["error"]["message"]


def test_a_prompt_may_be_cut_from_its_beginning(server: tuple[str, Service]) -> None:
    ids = post(server, "/tokenize", {"prompt": "the cat sat"}).json()["tokens"]
    asked = {"temperature": 0, "max_tokens": 4, "prompt": ids}
    whole = post(server, "/v1/completions", {**asked, "prompt": ids[-2:]}).json()
    cut = post(server, "/v1/completions", {**asked, "truncate_prompt_tokens": 2}).json()
    assert cut["usage"]["prompt_tokens"] == 2 < len(ids)
    assert cut["choices"] == whole["choices"]
    said = {"messages": USER, "max_tokens": 2, "truncate_prompt_tokens": 3}
    assert post(server, "/v1/chat/completions", said).json()["usage"]["prompt_tokens"] == 3
    wrong = post(server, "/v1/completions", {**asked, "truncate_prompt_tokens": 0})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "truncate_prompt_tokens"

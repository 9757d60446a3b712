"""The interfaces of agents: OpenAI's responses and Anthropic's messages, by their own clients, and
requests in the shapes that coding agents send.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from onboard.serve.service import Service
from tests.support.runtime.paused import SECONDS
from tests.support.serving import client_of_anthropic, client_of_openai, served, speaking_model

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA}
TOOL: Any = {"name": "weather", "description": "d", "input_schema": SCHEMA}
USER: Any = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    with served(speaking_model(tmp_path_factory.mktemp("served"))) as found:
        yield found


@pytest.fixture(scope="module")
def theirs(server: tuple[str, Service]) -> OpenAI:
    return client_of_openai(server[0])


@pytest.fixture(scope="module")
def claude(server: tuple[str, Service]) -> Anthropic:
    return client_of_anthropic(server[0])


@pytest.fixture(scope="module")
def expected(theirs: OpenAI) -> str:
    """The chat interface's answer, which the others have to give, too."""
    found = theirs.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=12
    )
    return str(found.choices[0].message.content)


def test_a_response(theirs: OpenAI, expected: str) -> None:
    options: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
    for given in ("the cat", USER, [{"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": "the cat"}]}]):  # fmt: skip
        found = theirs.responses.create(input=given, **options)
        assert found.output_text == expected
        assert found.status == "incomplete"
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.usage.output_tokens == 12
    events = list(theirs.responses.create(input="the cat", stream=True, **options))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected
    texts = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(texts) == expected


def test_a_response_calls_a_tool_and_gets_its_result(theirs: OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "tools": [FUNCTION],
        "max_output_tokens": 300,
        "parallel_tool_calls": False,
    }
    found = theirs.responses.create(input="the cat", tool_choice="required", **options)
    (call, *_) = [each for each in found.output if each.type == "function_call"]
    assert call.name == "weather"
    assert 0 <= json.loads(call.arguments)["days"] <= 9
    events = list(
        theirs.responses.create(
            input="the cat",
            tool_choice={"type": "function", "name": "weather"},
            stream=True,
            **options,
        )
    )
    kinds = [each.type for each in events]
    assert "response.function_call_arguments.delta" in kinds
    assert "response.output_item.done" in kinds
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "yes"}
    history: Any = [*USER, call.model_dump(), result]
    again = theirs.responses.create(
        input=history, model="tiny", tools=[FUNCTION], temperature=0, max_output_tokens=5
    )
    assert again.usage.input_tokens > found.usage.input_tokens


def test_a_response_has_the_shape_that_is_asked_for(theirs: OpenAI) -> None:
    shape: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    found = theirs.responses.create(
        model="tiny", input="the cat", text=shape, max_output_tokens=200
    )
    assert set(json.loads(found.output_text)) == {"days"}


def test_what_coding_agents_send(server: tuple[str, Service]) -> None:
    """A probe without input; tools of types that only OpenAI's servers run; a stored response."""
    url = f"{server[0]}/v1/responses"
    probe = httpx.post(
        url, json={"model": "tiny", "input": [], "max_output_tokens": 1}, timeout=SECONDS
    )
    assert probe.status_code == 200
    tools = [
        FUNCTION,
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp", "tools": [FUNCTION]},
        {"type": "image_generation", "output_format": "png"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ]
    body = {
        "model": "tiny",
        "instructions": "Work.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "y"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "..."},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"days":1}'},
            {"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_text", "text": "sun"}]},
        ],
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "max_output_tokens": 8,
    }  # fmt: skip
    answer = httpx.post(url, json=body, timeout=SECONDS)
    assert answer.status_code == 200
    names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names[0] == "response.created"
    assert names[-1] in ("response.completed", "response.incomplete")
    stored = httpx.post(url, json={**body, "previous_response_id": "resp_1"}, timeout=SECONDS)
    assert stored.status_code == 400
    assert stored.json()["error"]["code"] == "previous_response_not_found"
    models = httpx.get(f"{server[0]}/v1/models", timeout=SECONDS).json()
    assert models["models"]


def test_a_message(claude: Anthropic, expected: str) -> None:
    options: Any = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
    found = claude.messages.create(messages=USER, **options)
    assert found.content[0].text == expected
    assert found.stop_reason == "max_tokens"
    assert found.usage.output_tokens == 12
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
    assert claude.messages.create(messages=parts, **options).content[0].text == expected
    with claude.messages.stream(messages=USER, **options) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().usage.output_tokens == 12
    counted = claude.messages.count_tokens(model="tiny", messages=USER)
    assert counted.input_tokens == found.usage.input_tokens


def test_a_stop_sequence_is_named(claude: Anthropic, expected: str) -> None:
    # Bytes that are no character are held back until the next one: no text to stop at.
    whole = [character for character in expected[4:] if character not in "\ufffd\n"]
    stops = [whole[0], "never said"]
    options: Any = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
    options |= {"messages": USER, "stop_sequences": stops}
    found = claude.messages.create(**options)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stops[0])
    assert "".join(part.text for part in found.content) == expected[: expected.find(stops[0])]
    with claude.messages.stream(**options) as stream:
        last = stream.get_final_message()
    assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", stops[0])
    none = claude.messages.create(**{**options, "stop_sequences": stops[1:]})
    assert (none.stop_reason, none.stop_sequence) == ("max_tokens", None)


def test_a_message_uses_a_tool_and_gets_its_result(claude: Anthropic) -> None:
    options: Any = {"model": "tiny", "max_tokens": 300, "tools": [TOOL]}
    any_: Any = {"type": "any", "disable_parallel_tool_use": True}
    for choice in (any_, {"type": "tool", "name": "weather"}):
        found = claude.messages.create(messages=USER, tool_choice=choice, **options)
        assert found.stop_reason == "tool_use"
        use = found.content[-1]
        assert (use.type, use.name) == ("tool_use", "weather")
        assert 0 <= use.input["days"] <= 9
    with claude.messages.stream(messages=USER, tool_choice=any_, **options) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input["days"] in range(10)
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "sun"}],
    }
    history: Any = [
        *USER,
        {"role": "assistant", "content": [use.model_dump()]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    system: Any = [{"type": "text", "text": "Work.", "cache_control": {"type": "ephemeral"}}]
    again = claude.messages.create(messages=history, system=system, **options)
    assert again.usage.input_tokens > found.usage.input_tokens


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"messages": []}, 400, "no message"),
        ({"messages": USER, "model": "other"}, 404, "not served"),
        ({"messages": USER, "max_tokens": 0}, 400, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "image",
        ),
        ({"messages": [{"role": "user", "content": [7]}]}, 400, "no text"),
        ({"messages": USER, "tool_choice": {"type": "any"}}, 400, "there is none"),
    ],
)
def test_wrong_messages_are_refused_in_anthropics_form(
    server: tuple[str, Service], body: dict[str, Any], status: int, words: str
) -> None:
    for stream in (False, True):
        answer = httpx.post(
            f"{server[0]}/v1/messages", json={**body, "stream": stream}, timeout=SECONDS
        )
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": 7}]},
    ],
)
def test_wrong_responses_are_refused(server: tuple[str, Service], body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server[0]}/v1/responses", json=body, timeout=SECONDS)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_tokens_and_back(server: tuple[str, Service]) -> None:
    address, service = server
    found = httpx.post(f"{address}/tokenize", json={"prompt": "the cat"}, timeout=SECONDS).json()
    assert found["tokens"] == service.llm.llm.encode("the cat")
    chat = httpx.post(f"{address}/tokenize", json={"messages": USER}, timeout=SECONDS).json()
    written = service.llm.llm.engine.tokenizer.encode_plain("<user>the cat<assistant>")
    assert chat["tokens"] == written
    back = httpx.post(
        f"{address}/detokenize", json={"tokens": found["tokens"]}, timeout=SECONDS
    ).json()
    assert back["prompt"] == "the cat"
    assert (
        httpx.post(f"{address}/detokenize", json={"tokens": [10**12]}, timeout=SECONDS).status_code
        == 400
    )
    assert httpx.post(f"{address}/tokenize", json={}, timeout=SECONDS).status_code == 400

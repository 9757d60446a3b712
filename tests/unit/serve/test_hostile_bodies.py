"""Bodies that nobody meant well, drawn over the schemas of the API: a 4xx, or an answer; never a
failure, and the server lives on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from onboard.serve.dialects.paths import DIALECTS
from onboard.serve.service import Service
from tests.support.runtime.adapters import make_adapter
from tests.support.runtime.paused import SECONDS
from tests.support.serving import served, speaking_model

ADAPTERS = {"cats": ["q_proj", "v_proj"], "team/dogs": ["up_proj", "down_proj"]}
"""Each is for layers of its own."""
PATHS = [*DIALECTS, "/v1/messages/count_tokens", "/tokenize", "/detokenize"]
FIELDS = sorted({name for each in DIALECTS.values() for name in each.body.model_fields}
                | {"tokens", "custom"})  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["tiny", "required", "function", "json_schema", "user", "tool", "text"])
)
KEYS = st.sampled_from(
    ["type", "role", "content", "text", "function", "name", "parameters", "arguments", "schema",
     "json_schema", "tool_calls", "id", "input_schema", "regex", "choice", "grammar", "json", "0"]
) | st.text(max_size=4)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.just([{"role": "user", "content": "the cat"}])
RIGHT: dict[str, Any] = {"prompt": "the cat", "input": "the cat", "tokens": [1], "max_tokens": 2,
                         "max_output_tokens": 2}  # fmt: skip
FOUND = b'{"input": "the cat", "max_output_tokens": 2, "text": {"type": Infinity}}'
"""What was drawn once, and made the server fail: it was to be repeated in the answer."""


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A body in which some fields are right and others anything; or no JSON at all."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=40))
    body = dict(RIGHT) | {"messages": draw(MESSAGES)}
    body["model"] = draw(st.sampled_from(["tiny", *ADAPTERS]))
    body |= draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
    if isinstance(most := body.get("max_tokens"), int) and most > 64:
        body["max_tokens"] = 2  # long answers are no attack, and take long
    return json.dumps(body).encode(errors="surrogatepass")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    model = speaking_model(tmp_path_factory.mktemp("served"))
    folder = tmp_path_factory.mktemp("adapters")
    made = {name: make_adapter(folder / name, model, each) for name, each in ADAPTERS.items()}
    with served(model, lora={name: str(each.folder) for name, each in made.items()}) as found:
        yield found


@pytest.mark.parametrize(
    "count", [150, pytest.param(10_000, marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
def test_no_body_makes_the_server_fail(server: tuple[str, Service], count: int) -> None:
    address, service = server
    unusual = settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with httpx.Client(timeout=SECONDS) as client:

        @unusual
        @example(path="/v1/responses", body=FOUND)
        @given(path=st.sampled_from(PATHS), body=bodies())
        def attempt(path: str, body: bytes) -> None:
            answer = client.post(f"{address}{path}", content=body)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (
                path,
                body,
                answer.text,
            )
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]

        attempt()
        assert client.get(f"{address}/health").status_code == 200
    assert service.llm.thread.is_alive

"""`/openapi.json` is a description that tools can read: what it refers to is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from onboard.serve.dialects.paths import DIALECTS
from tests.support.serving import served, speaking_model


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with served(speaking_model(tmp_path_factory.mktemp("served"))) as (address, _):
        return httpx.get(f"{address}/openapi.json").json()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(found := value.get("$ref"), str):
            yield found
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from references(each)


def at(document: Any, pointer: str) -> Any:
    """As RFC 6901 has it."""
    for step in pointer.removeprefix("#/").split("/"):
        document = document[step.replace("~1", "/").replace("~0", "~")]
    return document


def test_every_reference_leads_to_a_schema(described: dict[str, Any]) -> None:
    found = set(references(described))
    assert any("StreamOptions" in each for each in found)
    for each in found:
        assert at(described, each)["type"] == "object", each


def test_bodies_refusals_and_streams_are_described(described: dict[str, Any]) -> None:
    posts = {path: each["post"] for path, each in described["paths"].items() if "post" in each}
    assert posts.keys() >= {*DIALECTS, "/tokenize", "/detokenize", "/v1/messages/count_tokens"}
    for path, post in posts.items():
        assert post["requestBody"]["content"]["application/json"]["schema"]["properties"], path
        assert {"200", "4XX", "5XX"} <= post["responses"].keys(), path
    for path in DIALECTS:
        assert "text/event-stream" in posts[path]["responses"]["200"]["content"]


def test_what_is_no_json_is_not_called_json(described: dict[str, Any]) -> None:
    paths = described["paths"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert "content" not in paths["/health"]["get"]["responses"]["200"]
    assert "503" in paths["/health"]["get"]["responses"]

"""What `/openapi.json` says of requests and refusals, which are read and written by hand."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class _Refusal(BaseModel):
    """Why a request is refused."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class RefusedAnswer(BaseModel):
    """What a client gets that is refused."""

    error: _Refusal


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": RefusedAnswer, "description": "The request is refused"},
    "5XX": {"model": RefusedAnswer, "description": "The server failed"},
}
LIFE: dict[int | str, dict[str, Any]] = {
    200: {"description": "It lives"},
    503: {"description": "It takes no more requests"},
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, as events where a stream is wanted",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def request_body(path: str, body: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a POST's body, whose references lead to its own definitions."""
    place = path.replace("~", "~0").replace("/", "~1")
    schema = body.model_json_schema(
        ref_template=f"#/paths/{place}/post/requestBody/content/application~1json/schema/$defs/"
        "{model}"
    )
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"content": content, "required": True}}

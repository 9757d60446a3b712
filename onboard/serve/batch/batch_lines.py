"""Lines of a file of requests (JSON Lines).

A line is one of OpenAI's batch interface (`custom_id`, `method`, `url`, `body`), a body alone (with
`messages` or `prompt`), or a prompt alone, as a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from onboard.errors import UsageError
from onboard.serve.dialects.paths import DIALECTS
from onboard.serve.refusals import RefusedError

_MOST_BYTES = 8 << 20
"""Of a line, as of a request's body."""


@dataclass(frozen=True)
class Line:
    """One request."""

    id: str
    """What tells it from all others: of its number, its text and the defaults."""
    custom_id: str
    """The user's name for it, else the number of its line."""
    path: str = ""
    body: bytes = b""
    problem: RefusedError | None = None
    """Why it is no request."""


def read_lines(file: Path, defaults: Mapping[str, Any], system: str | None) -> Iterator[Line]:
    """Yield the requests of a file, line by line, empty lines left out.

    `defaults` are fields that a body leaves open, `system` the first message of conversations that
    begin with no other of its kind.
    """
    context = json.dumps([dict(defaults), system], sort_keys=True).encode()
    with file.open("rb") as lines:
        number = 0
        while raw := lines.readline(_MOST_BYTES + 1):
            number += 1
            if len(raw) > _MOST_BYTES and not raw.endswith(b"\n"):
                raise UsageError(f"{file} has a line {number} of more than {_MOST_BYTES:,} bytes")
            if raw.strip():
                yield _line(number, raw.strip(), context, defaults, system)


def _line(
    number: int, raw: bytes, context: bytes, defaults: Mapping[str, Any], system: str | None
) -> Line:
    digest = blake2b(b"%d %s " % (number, context) + raw, digest_size=12).hexdigest()
    identity, name = f"batch_req_{digest}", f"line-{number}"
    try:
        given = _parsed(raw)
        name = str(given.get("custom_id", name))
        path, body = _request(given)
    except RefusedError as problem:
        return Line(identity, name, problem=problem)
    body = {**defaults, **body}
    if system is not None and "messages" in body:
        body["messages"] = _with_system(body["messages"], system)
    return Line(identity, name, path, json.dumps(body).encode())


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the line is no JSON ({error})") from None
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, dict):
        raise RefusedError("the line is neither an object nor a text")
    return value


def _request(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body that a line stands for."""
    if "url" in given:
        path, body = given["url"], given.get("body")
        if path not in DIALECTS or given.get("method", "POST") != "POST":
            known = ", ".join(DIALECTS)
            raise RefusedError(f"url is {path!r:.80}: known are POST {known}", param="url")
        if not isinstance(body, dict):
            raise RefusedError("the line has no body", param="body")
        return path, body
    body = {key: value for key, value in given.items() if key != "custom_id"}
    if "messages" in body:
        return "/v1/chat/completions", body
    if "prompt" in body:
        return "/v1/completions", body
    raise RefusedError("the line has neither prompt nor messages nor url")


def _with_system(messages: Any, system: str) -> Any:
    """Put the system's message before a conversation that has none."""
    if not isinstance(messages, list):
        return messages
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role") in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]

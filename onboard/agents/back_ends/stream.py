"""One request to an OpenAI-compatible endpoint: sent, streamed, tried again where it may be."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt

from onboard.agents.refused import RefusedError
from onboard.agents.role_settings import OpenAI

_BUSY = (408, 409, 425, 429)
_SILENCE = 120.0
"""Seconds without a byte after which a connection counts as cut."""
_LONGEST_WAIT = 60.0
_TOLD = 300


class _AgainError(Exception):
    """A failure that may pass; `seconds` is what the endpoint asks to wait."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


@dataclass
class Message:
    """What an endpoint has answered."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tools that it wants to be called: id, name, arguments (JSON)."""
    tokens_in: int = 0
    tokens_out: int = 0
    is_counted: bool = False
    """The endpoint said how many tokens there were."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key goes to the host that the settings name, and to no other."""

    def redirect_request(self, *_: Any) -> NoReturn:
        raise RefusedError("the endpoint leads elsewhere, which is not followed")


def complete(
    settings: OpenAI, key: str | None, body: Mapping[str, Any], deadline: float, most: int
) -> Message:
    """Return the answer to a request of chat completions.

    Args:
        settings: the endpoint.
        key: its key; None: none is sent.
        body: the request, but for what streaming needs.
        deadline: of `time.monotonic`.
        most: the most bytes of the answer.

    Raises:
        RefusedError: the endpoint refuses, is too busy for too long, or says too much.
    """

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.seconds if isinstance(error, _AgainError) else None
        own = settings.retry_seconds * 2 ** (state.attempt_number - 1)
        return min(asked if asked is not None else own, _LONGEST_WAIT, deadline - time.monotonic())

    retrying = Retrying(
        stop=stop_after_attempt(settings.retries + 1),
        wait=lambda state: max(0.0, wait(state)),
        retry=retry_if_exception_type(_AgainError),
        reraise=True,
    )
    try:
        return retrying(_once, settings, key, body, deadline, most)
    except _AgainError as error:
        raise RefusedError(f"the endpoint did not answer: {error}") from None


def _once(
    settings: OpenAI, key: str | None, body: Mapping[str, Any], deadline: float, most: int
) -> Message:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RefusedError(f"it was stopped after {settings.seconds:g} seconds")
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    request = urllib.request.Request(
        f"{settings.base_url}/chat/completions",
        json.dumps(sent).encode(),
        headers | ({"Authorization": f"Bearer {key}"} if key else {}),
    )
    opener = urllib.request.build_opener(_NoRedirects())
    try:
        with opener.open(request, timeout=min(left, _SILENCE)) as response:
            return _message(_events(response, settings, deadline, most))
    except urllib.error.HTTPError as error:
        _refused(error)
    except (OSError, http.client.HTTPException) as error:
        raise _AgainError(f"{type(error).__name__}: {error}") from None


def _refused(error: urllib.error.HTTPError) -> NoReturn:
    with error:
        text = " ".join(error.read(4096).decode("utf-8", errors="replace").split())[:_TOLD]
    reason = f"HTTP {error.code}: {text}"
    if error.code in _BUSY or error.code >= 500:
        after = error.headers.get("Retry-After", "")
        raise _AgainError(reason, float(after) if after.isdigit() else None)
    raise RefusedError(f"the endpoint refuses: {reason}")


def _events(response: Any, settings: OpenAI, deadline: float, most: int) -> Iterator[Any]:
    """Yield the chunks of a stream; one that ends before it says so was cut."""
    taken = 0
    while line := response.readline(most + 1):
        taken += len(line)
        if taken > most:
            raise RefusedError(f"it said more than {most:,} bytes")
        if time.monotonic() > deadline:
            raise RefusedError(f"it was stopped after {settings.seconds:g} seconds")
        name, _, data = line.decode("utf-8", errors="replace").partition(":")
        if name.strip() != "data":
            continue
        if data.strip() == "[DONE]":
            return
        try:
            yield json.loads(data)
        except (ValueError, RecursionError):
            raise _AgainError("a chunk is no JSON") from None
    raise _AgainError("the connection was cut")


def _message(events: Iterator[Any]) -> Message:
    message, calls = Message(), dict[int, dict[str, Any]]()
    try:
        for event in events:
            if event.get("error"):
                raise _AgainError(str(event["error"])[:_TOLD])
            _count(message, event.get("usage"))
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                message.text += delta.get("content") or ""
                for part in delta.get("tool_calls") or ():
                    _add(calls, part)
    except (AttributeError, TypeError, KeyError) as error:
        raise _AgainError(f"a chunk is not as the protocol has it: {error}") from None
    message.calls = [calls[index] for index in sorted(calls)]
    return message


def _count(message: Message, usage: Any) -> None:
    if isinstance(usage, dict):
        message.tokens_in = max(0, int(usage.get("prompt_tokens") or 0))
        message.tokens_out = max(0, int(usage.get("completion_tokens") or 0))
        message.is_counted = True


def _add(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Add a part of a call: its name comes at once, its arguments bit by bit."""
    call = calls.setdefault(int(part["index"]), {"id": "", "name": "", "arguments": ""})
    function = part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["name"] = function.get("name") or call["name"]
    call["arguments"] += function.get("arguments") or ""

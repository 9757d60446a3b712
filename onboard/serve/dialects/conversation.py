"""A conversation as OpenAI's chat interface has it, made ready for a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onboard.serve.refusals import RefusedError

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Parts of a message that are text, by the names of several interfaces."""


def as_messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are text and whose calls have parsed arguments.

    Raises `RefusedError` for parts other than text.
    """
    if not given:
        raise RefusedError("there is no message", param="messages")
    return [_message(place, dict(each)) for place, each in enumerate(given)]


def _message(place: int, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise RefusedError("a message has no role", param=f"messages.{place}.role")
    role = "system" if message["role"] == "developer" else message["role"]
    message |= {"role": role, "content": _text(place, message.get("content"))}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(place, call) for call in calls]
    return message


def _text(place: int, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedError("a message's content is no text", param=f"messages.{place}.content")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            parts.append(str(part.get("refusal", "")))
        elif kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise RefusedError(
                f"a message has a part of type {kind!r:.60}, and text alone is taken",
                param=f"messages.{place}.content",
            )
        else:
            parts.append(part["text"])
    return "\n".join(parts)


def _call(place: int, call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {**call, "function": {**function, "name": function["name"], "arguments": parsed}}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise RefusedError(
            "a call of a tool has no name, or arguments that are no JSON",
            param=f"messages.{place}.tool_calls",
        ) from None


def functions(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tools that are functions; those of other types are the client's own affair."""
    found = []
    for place, tool in enumerate(tools or ()):
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RefusedError("a function has no name", param=f"tools.{place}.function")
        found.append({"type": "function", "function": dict(function)})
    return found

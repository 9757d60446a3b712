"""A conversation as OpenAI's chat interface has it, made ready for a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onboard.errors import UsageError
from onboard.media.prompt_media import media_part
from onboard.serve.refusals import RefusedError

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Parts of a message that are text, by the names of several interfaces."""


def as_messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are text, or parts where there are images or sounds, and
    whose calls have parsed arguments.

    Raises `RefusedError` for other parts.
    """
    if not given:
        raise RefusedError("there is no message", param="messages")
    return [_message(place, dict(each)) for place, each in enumerate(given)]


def _message(place: int, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise RefusedError("a message has no role", param=f"messages.{place}.role")
    role = "system" if message["role"] == "developer" else message["role"]
    message |= {"role": role, "content": _content(place, message.get("content"))}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(place, call) for call in calls]
    return message


def _content(place: int, content: Any) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedError("a message's content is no text", param=f"messages.{place}.content")
    parts = [_part(place, part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(place: int, part: Any) -> dict[str, Any]:
    """Return a part of a message: a text, or an image or a sound as it was given."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal":
        return {"type": "text", "text": str(part.get("refusal", ""))}
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    try:
        if kind is not None and media_part(part) is not None:
            return dict(part)
    except UsageError as error:
        raise RefusedError(str(error), param=f"messages.{place}.content") from None
    raise RefusedError(
        f"a message has a part of type {kind!r:.60}, and text, images and sound are taken",
        param=f"messages.{place}.content",
    )


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

"""Which tools an answer may call, and whether it has to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onboard.serve.refusals import RefusedError

_FIELD = "tool_choice"


@dataclass(frozen=True)
class ToolChoice:
    """What a request says of tools, as functions of OpenAI's chat interface."""

    tools: Sequence[Mapping[str, Any]]
    """Those that a required call may be of."""
    required: bool = False
    name: str | None = None
    """The function that has to be called; None: any of them."""


def tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Read the choice of a request with these tools, in the words of chats or of responses.

    Raises `RefusedError` for one that is not understood, or that no tool can meet.
    """
    if choice in (None, "none", "auto"):
        return ToolChoice(tools)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), tools)
    name = _name(choice)
    if name is None and choice != "required":
        raise RefusedError(
            f"tool_choice is {choice!r:.100}: none, auto, required and a function's name in an"
            " object are known",
            param=_FIELD,
        )
    if not tools:
        raise RefusedError("a tool is required and there is none", param=_FIELD)
    if name is None:
        return ToolChoice(tools, required=True)
    if name not in names_of(tools):
        raise RefusedError(f"there is no tool {name!r:.100}", param=_FIELD)
    return ToolChoice(tools, required=True, name=name)


def _allowed(choice: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return the choice of some of the tools; where none is required the model sees them all."""
    listed = choice.get("tools") if isinstance(choice, Mapping) else None
    if not isinstance(listed, list):
        raise RefusedError("allowed_tools are no list", param=_FIELD)
    if choice.get("mode") != "required":
        return ToolChoice(tools)
    names = {_name(each) for each in listed}
    some = [tool for tool in tools if tool["function"]["name"] in names]
    if not some:
        raise RefusedError("a tool is required and none of the allowed ones is there", param=_FIELD)
    return ToolChoice(some, required=True)


def _name(choice: Any) -> str | None:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def names_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of functions."""
    return [tool["function"]["name"] for tool in tools]


def forced_schema(choice: ToolChoice, *, several: bool = True) -> dict[str, Any]:
    """Return the JSON schema of an answer that has to call a tool.

    Of one function it is that one's arguments; else a list of objects with name and parameters, of
    one unless there may be `several`.
    """
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"}
        for tool in choice.tools
    }
    if choice.name is not None:
        schema: dict[str, Any] = schemas[choice.name]
        return schema
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for each, schema in schemas.items()
    ]
    most = {} if several else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}

"""`POST /v1/responses`: OpenAI's interface for agents. Nothing is stored between requests."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from pydantic import Field

from onboard.serve.answers.answer_blocks import Block, Blocks, Change
from onboard.serve.dialects.chat import Chat, ChatBody
from onboard.serve.dialects.events import event
from onboard.serve.dialects.fields import Body
from onboard.serve.refusals import RefusedError
from onboard.serve.request_scope import request_scope
from onboard.serve.service import Service

_PREFIXES: Any = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
_GROWS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


class ResponsesBody(Body):
    """The request."""

    model: str | None = None
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    temperature: float | None = Field(default=None, ge=0.0)
    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool = False


class Response:
    """One request, on its way: a chat with other words."""

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        for field in ("previous_response_id", "conversation"):
            if getattr(body, field) is not None:
                raise RefusedError(
                    "responses are not stored here: send the whole conversation",
                    param=field,
                    code="previous_response_not_found",
                )
        self.body = body
        self.chat = Chat(service, as_chat(body))
        scope = request_scope()
        self.id, self.created = f"resp_{scope.new_name()}", scope.created
        self._blocks = Blocks(_PREFIXES, iter(scope.new_name, None))
        self._tokens = 0
        self._cut = False
        self._number = itertools.count()

    async def prepare(self) -> None:
        """Write the conversation as the chat template says."""
        await self.chat.prepare()

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        async with aclosing(self._changes()) as changes:
            async for _ in changes:
                pass
        return self._document("incomplete" if self._cut else "completed")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as it comes."""
        begun = False
        async with aclosing(self._changes()) as changes:
            async for change in changes:
                if not begun:
                    begun = True
                    for each in self._begin():
                        yield each
                for each in self._told(change):
                    yield each
        for each in [] if begun else self._begin():
            yield each
        end = "incomplete" if self._cut else "completed"
        yield self._event(f"response.{end}", response=self._document(end))

    def failed(self, refusal: RefusedError) -> bytes:
        """Return the event that ends a stream on which something failed."""
        error = {"code": refusal.code or refusal.kind, "message": refusal.message}
        document = {**self._document("failed"), "error": error, "output": []}
        return self._event("response.failed", response=document)

    async def _changes(self) -> AsyncGenerator[Change, None]:
        async with aclosing(self.chat.news()) as each:
            async for news in each:
                self._tokens += len(news.delta.token_ids)
                for piece in news.pieces:
                    for change in self._blocks.feed(piece):
                        yield change
                if news.delta.finish_reason is not None:
                    self._cut = news.delta.finish_reason == "length"
                    for change in self._blocks.end():
                        yield change

    def _begin(self) -> Iterator[bytes]:
        document = {**self._document("in_progress"), "output": []}
        yield self._event("response.created", response=document)
        yield self._event("response.in_progress", response=document)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._number), **fields}, kind)

    def _told(self, change: Change) -> Iterator[bytes]:
        block, where = change.block, {"output_index": change.block.number}
        part = {"item_id": block.id, **where}
        part |= {} if block.kind == "call" else {"content_index": 0}
        grows = _GROWS[block.kind]
        if change.what == "open":
            empty = Block(block.kind, block.number, block.id, "", block.name)
            item = {**_item(empty, "in_progress"), "content": []}
            item = _item(empty, "in_progress") if block.kind == "call" else item
            yield self._event("response.output_item.added", item=item, **where)
            if block.kind != "call":
                yield self._event("response.content_part.added", part=_content(empty), **part)
        elif change.what == "grow":
            yield self._event(f"{grows}.delta", delta=change.text, **part)
        else:
            field = "arguments" if block.kind == "call" else "text"
            yield self._event(f"{grows}.done", **{field: block.text}, **part)
            if block.kind != "call":
                yield self._event("response.content_part.done", part=_content(block), **part)
            yield self._event("response.output_item.done", item=_item(block), **where)

    def _document(self, status: str) -> dict[str, Any]:
        body, done = self.body, status != "in_progress"
        prompted = len(self.chat.prompt.tokens)
        counts = {
            "input_tokens": prompted,
            "input_tokens_details": {"cached_tokens": self.chat.num_cached_tokens},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompted + self._tokens,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.chat.model,
            "output": [_item(block) for block in self._blocks.done],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": body.reasoning,
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": counts if done else None,
        }


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str = "completed") -> dict[str, Any]:
    """Return a block as an item of the output."""
    item: dict[str, Any] = {"id": block.id, "status": status}
    if block.kind == "call":
        call = {"call_id": f"call_{block.id[3:]}", "name": block.name, "arguments": block.text}
        return {**item, "type": "function_call", **call}
    if block.kind == "reasoning":
        return {**item, "type": "reasoning", "summary": [], "content": [_content(block)]}
    return {**item, "type": "message", "role": "assistant", "content": [_content(block)]}


def as_chat(body: ResponsesBody) -> ChatBody:
    """Return the same request in the words of the chat interface."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    given = body.input
    if isinstance(given, str) or not given:  # clients probe with nothing
        messages.append({"role": "user", "content": given or ""})
    else:
        messages += _messages(given)
    return ChatBody(
        model=body.model,
        stream=body.stream,
        messages=messages,
        max_tokens=body.max_output_tokens,
        tools=_tools(body.tools or []) or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        temperature=body.temperature,
        top_p=body.top_p,
        reasoning_effort=(body.reasoning or {}).get("effort"),
        response_format=_format(body.text or {}),
    )


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items as messages; calls behind one another are of one message.

    Thoughts, and what tools of OpenAI's own servers did, are left aside.
    """
    found: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            found.append({"role": item.get("role"), "content": item.get("content")})
        elif kind in _CALLS:
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(_call(item))
        elif kind in _OUTPUTS:
            output = item.get("output")
            content = output if isinstance(output, str | list) else str(output)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "item_reference":
            raise RefusedError("items are not stored here: send them whole", param=f"input.{place}")
    return found


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")})
    function = {"name": item.get("name"), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions; tools that OpenAI's own servers run, and groups of them, are left
    aside.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("parameters") or {"type": "object"},
            },
        }
        for tool in tools
        if tool.get("type") == "function"
    ]


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return the choice; one of a tool that only OpenAI's own servers run is none."""
    known = not isinstance(choice, dict) or choice.get("type") in ("function", "allowed_tools")
    return choice if known else "auto"


def _format(text: Mapping[str, Any]) -> Any:
    wanted = text.get("format")
    if not isinstance(wanted, Mapping) or wanted.get("type") in (None, "text"):
        return None
    if wanted["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema", {})}}
    return {"type": wanted["type"]}

"""`POST /v1/messages`: Anthropic's interface for conversations."""

from __future__ import annotations

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

_PREFIXES: Any = {"text": "", "reasoning": "", "call": "toolu_"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_STOPS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "sequence": "stop_sequence",
    "stop": "end_turn",
}


class MessagesBody(Body):
    """The request."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int = Field(default=1024, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(default=None, ge=0.0)
    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
    top_k: int | None = None
    stream: bool = False


class Messages:
    """One request, on its way: a chat with other words."""

    def __init__(self, service: Service, body: MessagesBody) -> None:
        self.body = body
        self.chat = Chat(service, as_chat(body))
        self.id = f"msg_{request_scope().new_name()}"
        self._stop = "stop"
        self._sequence: str | None = None
        self._tokens = 0

    async def prepare(self) -> None:
        """Write the conversation as the chat template says."""
        await self.chat.prepare()

    def counted(self) -> dict[str, Any]:
        """Return the number of the prompt's tokens."""
        return {"input_tokens": len(self.chat.prompt.tokens)}

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        blocks = _blocks()
        async with aclosing(self._changes(blocks)) as changes:
            async for _ in changes:
                pass
        return {**self._message(), "content": [_block(each) for each in blocks.done]}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as it comes."""
        begun = False
        async with aclosing(self._changes(_blocks())) as changes:
            async for change in changes:
                if not begun:
                    yield self._start()
                    begun = True
                for each in _told(change):
                    yield each
        if not begun:
            yield self._start()
        end = {"stop_reason": _STOPS[self._stop], "stop_sequence": self._sequence}
        yield _event("message_delta", delta=end, usage={"output_tokens": self._tokens})
        yield _event("message_stop")

    def failed(self, refusal: RefusedError) -> bytes:
        """Return the event that ends a stream on which something failed."""
        return event(refusal.body_of_messages(), "error")

    async def _changes(self, blocks: Blocks) -> AsyncGenerator[Change, None]:
        async with aclosing(self.chat.news()) as each:
            async for news in each:
                self._tokens += len(news.delta.token_ids)
                for piece in news.pieces:
                    for change in blocks.feed(piece):
                        yield change
                if (reason := news.delta.finish_reason) is not None:
                    for change in blocks.end():
                        yield change
                    called = any(block.kind == "call" for block in blocks.done)
                    self._ended(reason, news.delta.stop_reason, called)

    def _start(self) -> bytes:
        open_ = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._message(), **open_})

    def _ended(self, reason: str, by: str | int | None, called: bool) -> None:
        """Keep why the answer ended: cut off, with a call, by a stop sequence, or of itself."""
        self._stop = "length" if reason == "length" else "tool_calls" if called else "stop"
        if self._stop == "stop" and isinstance(by, str):
            self._stop, self._sequence = "sequence", by

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.chat.model,
            "content": [],
            "stop_reason": _STOPS[self._stop],
            "stop_sequence": self._sequence,
            "usage": {**self.counted(), "output_tokens": self._tokens},
        }


def _blocks() -> Blocks:
    scope = request_scope()
    return Blocks(_PREFIXES, iter(lambda: scope.new_name()[:24], None))


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _told(change: Change) -> Iterator[bytes]:
    block = change.block
    if change.what == "open":
        empty = Block(block.kind, block.number, block.id, "", block.name)
        yield _event("content_block_start", index=block.number, content_block=_block(empty))
    elif change.what == "grow":
        kind, field = _DELTAS[block.kind]
        delta = {"type": kind, field: change.text}
        yield _event("content_block_delta", index=block.number, delta=delta)
    else:
        yield _event("content_block_stop", index=block.number)


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": _parsed(block.text)}


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}


def as_chat(body: MessagesBody) -> ChatBody:
    """Return the same request in the words of the chat interface."""
    system = body.system if isinstance(body.system, str) else _joined(body.system or [])
    messages = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(body.messages):
        messages += _messages(place, message)
    return ChatBody(
        model=body.model,
        stream=body.stream,
        messages=messages,
        max_tokens=body.max_tokens,
        tools=_tools(body.tools or []) or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice or {}).get("disable_parallel_tool_use", False),
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def _joined(parts: list[Any]) -> str:
    """Return the text of parts; of others the model learns that they were there."""
    found = (part if isinstance(part, Mapping) else {} for part in parts)
    return "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in found)


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools with a schema; those that Anthropic's own servers run have none."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
        if isinstance(tool.get("input_schema"), Mapping)
    ]


def _choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    kind = (choice or {}).get("type", "auto")
    if kind == "tool" and choice is not None:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"any": "required", "none": "none"}.get(str(kind), "auto")


def _messages(place: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one message as the chat interface has it: results of tools are messages there."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise RefusedError("a message's content is no text", param=f"messages.{place}.content")
    texts, calls, results, thoughts = [], [], [], []
    for part in content:
        kind = part.get("type")
        if kind == "tool_use":
            calls.append(_call(part))
        elif kind == "tool_result":
            results.append(_result(part))
        elif kind in ("thinking", "redacted_thinking"):
            thoughts.append(str(part.get("thinking", "")))
        else:
            texts.append(_image(part) if kind == "image" else dict(part))
    found: dict[str, Any] = {"role": role, "content": texts or None}
    found |= {"tool_calls": calls} if calls else {}
    found |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    return [*results, *([found] if texts or calls or not results else [])]


def _image(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return an image as the chat interface has it."""
    given = part.get("source")
    source = given if isinstance(given, Mapping) else {}
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    url = data if source.get("type") == "base64" else source.get("url")
    return {"type": "image_url", "image_url": {"url": url}}


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})}
    return {"id": part.get("id"), "type": "function", "function": function}


def _result(part: Mapping[str, Any]) -> dict[str, Any]:
    content = part.get("content")
    text = _joined(content) if isinstance(content, list) else str(content or "")
    return {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text}

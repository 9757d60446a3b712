"""The back end `openai`: an endpoint of chat completions, with tools that work on copies in memory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from onboard.agents.back_ends.stream import Message, complete
from onboard.agents.back_ends.tools import TOOLS, Desk
from onboard.agents.refused import RefusedError, Usage
from onboard.agents.role_settings import OpenAI
from onboard.agents.workspace import Event, Reply, Workspace

_BYTES_OF_TOKEN = 4
_MILLION = 1e6


@dataclass(frozen=True)
class EndpointBackEnd:
    """Asks, calls the tools that are asked for, and asks again, until there is an answer."""

    settings: OpenAI

    def ask(self, prompt: str, workspace: Workspace, event: Event) -> Reply:
        """Hold the conversation; see `BackEnd`."""
        desk, usage = Desk(workspace), Usage()
        try:
            text = self._converse(prompt, desk, usage, event)
        except RefusedError as error:
            error.usage = usage
            raise
        return Reply(text, desk.changed, usage)

    def _converse(self, prompt: str, desk: Desk, usage: Usage, event: Event) -> str:
        """Return what is said when no tool is called any more; `usage` grows as it is taken."""
        own = self.settings
        deadline, left = time.monotonic() + own.seconds, own.output_bytes
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        for _ in range(own.steps):
            body = {"model": own.model, "messages": messages, "tools": TOOLS}
            answer = complete(own, os.environ.get(own.key_variable), body, deadline, left)
            left -= _bytes(answer)
            usage.add(self._usage(answer, messages))
            event("answer", {"text": answer.text, "calls": answer.calls, "tokens": usage.tokens})
            if not answer.calls:
                return answer.text
            self._check(usage, left)
            messages.append(_as_sent(answer))
            messages += [_result(call, desk, event) for call in answer.calls]
        raise RefusedError(f"there was no answer in {own.steps} requests")

    def _usage(self, answer: Message, messages: list[dict[str, Any]]) -> Usage:
        own = self.settings.prices
        given, made = answer.tokens_in, answer.tokens_out
        if not answer.is_counted:
            given = sum(len(str(each)) for each in messages) // _BYTES_OF_TOKEN
            made = _bytes(answer) // _BYTES_OF_TOKEN
        cost = (given * own.input + made * own.output) / _MILLION
        return Usage(given + made, cost, not answer.is_counted)

    def _check(self, usage: Usage, left: int) -> None:
        """Stop a conversation that goes on past its bounds."""
        own = self.settings
        if left <= 0:
            raise RefusedError(f"it said more than {own.output_bytes:,} bytes")
        if own.tokens is not None and usage.tokens > own.tokens:
            raise RefusedError(f"it took {usage.tokens:,} tokens, of {own.tokens:,} at most")
        if own.cost is not None and usage.cost > own.cost:
            raise RefusedError(f"it cost {usage.cost:.2f} dollars, of {own.cost:.2f} at most")


def _result(call: dict[str, Any], desk: Desk, event: Event) -> dict[str, Any]:
    """Return what a tool says, as the next request has it."""
    said = desk.call(call["name"], call["arguments"])
    event("tool", {"name": call["name"], "said": said})
    return {"role": "tool", "tool_call_id": call["id"], "content": said}


def _bytes(answer: Message) -> int:
    return len(answer.text) + sum(len(call["arguments"]) for call in answer.calls)


def _as_sent(answer: Message) -> dict[str, Any]:
    """Return an answer as the next request has it."""
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in answer.calls
    ]
    return {"role": "assistant", "content": answer.text or None, "tool_calls": calls}

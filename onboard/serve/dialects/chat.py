"""`POST /v1/chat/completions`: OpenAI's interface for conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic import Field

from onboard.runtime.calls.outputs import Delta
from onboard.runtime.sampling_params import SamplingParams
from onboard.serve.answers.answer_pieces import (
    Answer,
    ArgumentsPiece,
    CallPiece,
    Piece,
    ReasoningPiece,
)
from onboard.serve.answers.answering import ForcedCalls, News, Reader, answers
from onboard.serve.answers.reader import AnswerReader
from onboard.serve.dialects.conversation import as_messages, functions
from onboard.serve.dialects.events import DONE, event
from onboard.serve.dialects.fields import Body, Sampling, usage
from onboard.serve.dialects.tool_choice import forced_schema, names_of, tool_choice
from onboard.serve.refusals import RefusedError
from onboard.serve.request_scope import request_scope
from onboard.serve.service import Prompt, Service


class ResponseFormat(Body):
    """What the text of an answer has to be."""

    type: str = "text"
    json_schema: dict[str, Any] | None = None


class ChatBody(Sampling):
    """The request."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=100)
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Chat:
    """One request, on its way."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.service, self.body = service, body
        self.model = service.check_model(body.model)
        if body.n > service.settings.max_outputs:
            raise RefusedError(
                f"{body.n} outputs are more than the {service.settings.max_outputs} that a request"
                " may have",
                param="n",
            )
        scope = request_scope()
        self.id, self.created = f"chatcmpl-{scope.new_name()}", scope.created
        self.messages = as_messages(body.messages)
        self.tools = [] if body.tool_choice == "none" else functions(body.tools)
        self.choice = tool_choice(body.tool_choice, self.tools)
        self.params = self._params()
        self.prompt = Prompt([])
        self.num_cached_tokens = 0
        """Leading tokens of the prompt that were reused, once the answer has begun."""

    async def prepare(self) -> None:
        """Write the conversation as the chat template says."""
        body = self.body
        options = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            options.setdefault("reasoning_effort", body.reasoning_effort)
        options["add_generation_prompt"] = body.add_generation_prompt
        if body.continue_final_message:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        prompt = await self.service.chat_prompt(self.messages, self.tools or None, options)
        if prompt.inputs is not None and body.truncate_prompt_tokens is not None:
            raise RefusedError(
                "a prompt with images or sounds is not cut", param="truncate_prompt_tokens"
            )
        self.prompt = replace(prompt, tokens=body.truncated(prompt.tokens))

    def _params(self) -> SamplingParams:
        body = self.body
        if body.top_logprobs and not body.logprobs:
            raise RefusedError("top_logprobs come with logprobs alone", param="top_logprobs")
        further: dict[str, Any] = {
            "max_tokens": body.max_completion_tokens or body.max_tokens,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "skip_special_tokens": False,
            "lora": self.service.adapter(self.model),
        }
        if self.choice.required:
            schema = forced_schema(self.choice, several=body.parallel_tool_calls)
            further["structured_outputs"] = {"json_schema": schema}
        elif (wanted := _structure(body.response_format)) is not None:
            further["structured_outputs"] = wanted
        return body.params(self.service.defaults, **further)

    def _reader(self) -> Callable[[], Reader]:
        if self.choice.required:
            return lambda: ForcedCalls(self.choice.name, in_pieces=self.body.stream)
        names = names_of(self.tools)
        shape = self.service.answer_format(names)
        if self.params.structured_outputs is not None:
            return lambda: AnswerReader(None, "", "", removed=self.service.special_texts)
        given = shape, self.prompt.text, self.prompt.turn, self.tools, self.service.special_texts
        return lambda: AnswerReader(*given, in_pieces=self.body.stream)

    async def news(self) -> AsyncGenerator[News, None]:
        """Generate, and yield what comes."""
        async with aclosing(
            answers(self.service, self.prompt, self.params, self._reader())
        ) as each:
            async for news in each:
                self.num_cached_tokens = news.delta.num_cached_tokens
                yield news

    def failed(self, refusal: RefusedError) -> bytes:
        """Return the event that ends a stream on which something failed."""
        return event(refusal.body())

    def _usage(self, tokens: int) -> dict[str, Any]:
        return usage(len(self.prompt.tokens), tokens, self.num_cached_tokens)

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        found = [Answer() for _ in range(self.body.n)]
        scores: list[list[dict[str, Any]]] = [[] for _ in found]
        ends: list[str] = ["stop"] * len(found)
        tokens = 0
        async with aclosing(self.news()) as each:
            async for news in each:
                index = news.delta.index
                tokens += len(news.delta.token_ids)
                scores[index] += self._scores(news.delta)
                for piece in news.pieces:
                    found[index].add(piece)
                if news.delta.finish_reason is not None:
                    ends[index] = finish_reason(news.delta, bool(found[index].calls))
        choices = [
            {
                "index": index,
                "message": message(answer),
                "logprobs": {"content": scores[index]} if self.body.logprobs else None,
                "finish_reason": ends[index],
            }
            for index, answer in enumerate(found)
        ]
        return {**self._head("chat.completion", choices), "usage": self._usage(tokens)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as it comes."""
        kind, tokens, called = "chat.completion.chunk", 0, set()
        begun: set[int] = set()
        async with aclosing(self.news()) as each:
            async for news in each:
                index = news.delta.index
                if index not in begun:
                    begun.add(index)
                    first = {"role": "assistant", "content": ""}
                    yield event(self._head(kind, [_choice(index, first)]))
                tokens += len(news.delta.token_ids)
                called |= {index for piece in news.pieces if isinstance(piece, CallPiece)}
                end = None
                if news.delta.finish_reason is not None:
                    end = finish_reason(news.delta, index in called)
                for choice in self._parts(news, end):
                    yield event(self._head(kind, [choice]))
        if self.body.wants_usage:
            yield event({**self._head(kind, []), "usage": self._usage(tokens)})
        yield DONE

    def _parts(self, news: News, end: str | None) -> Iterator[dict[str, Any]]:
        index, scores = news.delta.index, self._scores(news.delta)
        for piece in news.pieces:
            choice = _choice(index, delta_of(piece))
            if scores:
                choice["logprobs"], scores = {"content": scores}, []
            yield choice
        if scores or end is not None:
            found = {"content": scores} if scores else None
            yield {**_choice(index, {}), "logprobs": found, "finish_reason": end}

    def _scores(self, delta: Delta) -> list[dict[str, Any]]:
        """Return log-probabilities as the chat interface has them."""
        if not self.body.logprobs or delta.logprobs is None:
            return []
        found, most = [], self.body.top_logprobs or 0
        for token, row in zip(delta.token_ids, delta.logprobs, strict=True):
            best = sorted(row.items(), key=lambda item: -item[1])[:most]
            others = [self._score(each, value) for each, value in best]
            found.append({**self._score(token, row[token]), "top_logprobs": others})
        return found

    def _score(self, token: int, value: float) -> dict[str, Any]:
        own, text = self.service.tokenizer, self.service.token_text(token)
        own_bytes = text.encode() if own is None else own.bytes_of(token)
        return {"token": text, "logprob": value, "bytes": list(own_bytes)}

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _structure(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise RefusedError("response_format has no json_schema", param="response_format")
        if not isinstance(schema := wanted.json_schema.get("schema", {}), dict):
            raise RefusedError("json_schema.schema is no object", param="response_format")
        return {"json_schema": schema}
    raise RefusedError(
        f"response_format is {wanted.type!r:.60}: text, json_object and json_schema are known",
        param="response_format",
    )


def _choice(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": dict(delta), "logprobs": None, "finish_reason": None}


def call_id() -> str:
    """Return a new name for a call, by which its result is given."""
    return f"call_{request_scope().new_name()[:24]}"


def _call(piece: CallPiece) -> dict[str, Any]:
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": call_id(), "type": "function", "function": function}


def delta_of(piece: Piece) -> dict[str, Any]:
    """Return a piece as a stream has it."""
    if isinstance(piece, CallPiece):
        return {"tool_calls": [{"index": piece.number, **_call(piece)}]}
    if isinstance(piece, ArgumentsPiece):
        more = {"index": piece.number, "function": {"arguments": piece.text}}
        return {"tool_calls": [more]}
    if isinstance(piece, ReasoningPiece):
        return {"reasoning_content": piece.text, "reasoning": piece.text}
    return {"content": piece.text}


def message(answer: Answer) -> dict[str, Any]:
    """Return a whole answer as a message."""
    found: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.reasoning:
        found |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        found["tool_calls"] = [_call(call) for call in answer.calls]
    else:
        found["content"] = answer.text
    return found


def finish_reason(delta: Delta, called: bool) -> str:
    """Return why an output ended, in OpenAI's words."""
    if delta.finish_reason == "length":
        return "length"
    return "tool_calls" if called else "stop"

"""`POST /v1/completions`: OpenAI's interface for text that goes on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import Field

from onboard.runtime.calls.outputs import Delta
from onboard.runtime.sampling_params import SamplingParams
from onboard.serve.dialects.events import DONE, event
from onboard.serve.dialects.fields import Sampling, Tokens, usage
from onboard.serve.dialects.merging import merged
from onboard.serve.dialects.text_places import TextPlaces
from onboard.serve.refusals import RefusedError
from onboard.serve.request_scope import request_scope
from onboard.serve.service import Prompt, Service

_ENDS = {"stop": "stop", "length": "length", "abort": "stop"}


class CompletionBody(Sampling):
    """The request."""

    prompt: str | Tokens | list[str] | list[Tokens] = ""
    max_tokens: int | None = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=100)
    echo: bool = False
    suffix: str | None = None


class Completion:
    """One request, on its way."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        self.service, self.body = service, body
        self.model = service.check_model(body.model)
        if body.suffix:
            raise RefusedError("text that is put in between is not made here", param="suffix")
        scope = request_scope()
        self.id, self.created = f"cmpl-{scope.new_name()}", scope.created
        self.prompts: list[Prompt] = []
        self.params = self._params()
        self._echoed: dict[int, int] = {}
        """The characters of the prompt that an output begins with."""
        self._places: dict[int, TextPlaces] = {}
        self._tokens = 0
        self._cached: dict[int, int] = {}
        """Of each prompt the tokens that were reused."""

    async def prepare(self) -> None:
        """Tokenize the prompts; raise `RefusedError` for too many."""
        given = prompts_of(self.body.prompt, "prompt")
        if len(given) * self.body.n > self.service.settings.max_outputs:
            raise RefusedError(
                f"{len(given)} prompts with {self.body.n} outputs each are more than the"
                f" {self.service.settings.max_outputs} outputs that a request may have",
                param="n",
            )
        for each in given:
            tokens = each if isinstance(each, list) else await self.service.llm.tokenize(each)
            self.prompts.append(Prompt(self.body.truncated(tokens)))

    def _params(self) -> SamplingParams:
        body = self.body
        if body.max_tokens == 0 and not body.echo:
            raise RefusedError("max_tokens is 0 and the prompt is not wanted", param="max_tokens")
        most = 1 if body.max_tokens == 0 else body.max_tokens
        further = {"max_tokens": most, "logprobs": body.logprobs}
        lora = self.service.adapter(self.model)
        return body.params(self.service.defaults, **further, lora=lora)

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [_empty(index) for index in range(len(self.prompts) * self.body.n)]
        async with aclosing(self._parts()) as parts:
            async for some in parts:
                for choice in some:
                    _join(choices[choice["index"]], choice)
        return {**self._head(choices), "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as it comes."""
        async with aclosing(self._parts()) as parts:
            async for some in parts:
                for choice in some:
                    yield event(self._head([choice]))
        if self.body.wants_usage:
            yield event({**self._head([]), "usage": self._usage()})
        yield DONE

    def failed(self, refusal: RefusedError) -> bytes:
        """Return the event that ends a stream on which something failed."""
        return event(refusal.body())

    def _usage(self) -> dict[str, Any]:
        prompted = sum(len(prompt.tokens) for prompt in self.prompts)
        return usage(prompted, self._tokens, sum(self._cached.values()))

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    async def _parts(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield parts of the outputs of all prompts, which run at once, and count their tokens: all
        that a delta brings.
        """
        streams = [self._parts_of(number, prompt) for number, prompt in enumerate(self.prompts)]
        async with self.service.admitted(), aclosing(merged(streams)) as parts:
            async for some in parts:
                yield some

    async def _parts_of(
        self, number: int, prompt: Prompt
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        async with aclosing(self.service.follow(prompt, self.params, number)) as deltas:
            echoed: set[int] = set()
            async for delta in deltas:
                index = number * self.body.n + delta.index
                self._cached[number] = delta.num_cached_tokens
                found = []
                if self.body.echo and delta.index not in echoed:
                    echoed.add(delta.index)
                    found.append(await self._echo(index, prompt))
                if self.body.max_tokens != 0:
                    self._tokens += len(delta.token_ids)
                    found.append(self._part(index, delta))
                elif delta.finish_reason is not None:
                    found.append({**_empty(index), "finish_reason": "length"})
                yield found

    def _part(self, index: int, delta: Delta) -> dict[str, Any]:
        found = None
        if delta.logprobs is not None:
            places = self._places_of(index).following(delta.token_ids)
            found = self._logprobs(places, delta.token_ids, delta.logprobs)
        end = None if delta.finish_reason is None else _ENDS[delta.finish_reason]
        return {"index": index, "text": delta.text, "logprobs": found, "finish_reason": end}

    async def _echo(self, index: int, prompt: Prompt) -> dict[str, Any]:
        text = self.service.text_of(prompt.tokens)
        self._echoed[index], found = len(text), None
        if (most := self.body.logprobs) is not None:
            scores = await self.service.llm.score(prompt.tokens, most, self.params.lora)
            places = TextPlaces(self.service.tokenizer).following(prompt.tokens)
            found = self._logprobs(places, prompt.tokens, scores)
        return {"index": index, "text": text, "logprobs": found, "finish_reason": None}

    def _places_of(self, index: int) -> TextPlaces:
        """Return where the tokens of an output begin, behind the prompt if that is repeated."""
        if index not in self._places:
            start, skip = self._echoed.get(index, 0), self.params.skip_special_tokens
            self._places[index] = TextPlaces(
                self.service.tokenizer, start, skip_special_tokens=skip
            )
        return self._places[index]

    def _logprobs(
        self,
        places: list[int],
        tokens: Sequence[int],
        rows: Sequence[Mapping[int, float] | None],
    ) -> dict[str, Any]:
        """Return log-probabilities as the interface has had them since 2020."""
        words = [self.service.token_text(token) for token in tokens]
        best = [
            None if row is None else {self.service.token_text(t): value for t, value in row.items()}
            for row in rows
        ]
        chosen = [
            None if row is None else row[token] for token, row in zip(tokens, rows, strict=True)
        ]
        return {
            "tokens": words,
            "token_logprobs": chosen,
            "top_logprobs": best,
            "text_offset": places,
        }


def prompts_of(given: Any, field: str) -> list[str | list[int]]:
    """Return one prompt or several as a list; raise `RefusedError` if there is none in `field`."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not given:
        raise RefusedError(f"there is no {field}", param=field)
    return list(given)


def _empty(index: int) -> dict[str, Any]:
    return {"index": index, "text": "", "logprobs": None, "finish_reason": None}


def _join(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Put a part of an output behind the others."""
    whole["text"] += part["text"]
    whole["finish_reason"] = part["finish_reason"] or whole["finish_reason"]
    if part["logprobs"] is not None:
        before = whole["logprobs"] or {key: [] for key in part["logprobs"]}
        whole["logprobs"] = {key: before[key] + part["logprobs"][key] for key in before}

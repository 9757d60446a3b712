"""The model behind the doors: admits requests, writes their prompts, follows their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from onboard.errors import ConsentRequiredError, OnboardError, UsageError
from onboard.media.prompt_media import MediaPart, PromptMedia, split_media
from onboard.runtime.calls.async_llm import AsyncLLM
from onboard.runtime.calls.outputs import Delta
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.tokenizer import Tokenizer, tokenizer_folder
from onboard.serve.answers.chat_texts import ChatTexts
from onboard.serve.answers.formats import Format, format_for
from onboard.serve.prometheus import Metrics
from onboard.serve.refusals import RefusedError
from onboard.serve.request_scope import request_scope
from onboard.serve.serve_settings import ServeSettings
from onboard.untrusted.bounds import read_json

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Prompt:
    """What a model is given."""

    tokens: list[int]
    text: str = ""
    turn: str = ""
    """The end of `text` that begins the model's turn."""
    inputs: dict[str, Any] | None = None
    """What the towers take of its images and sounds."""


class Service:
    """One model and its settings."""

    def __init__(self, llm: AsyncLLM, settings: ServeSettings, checkpoint: Path) -> None:
        self.llm, self.settings = llm, settings
        self.started = int(time.time())
        self.metrics = Metrics(llm.llm.engine, settings.names[0])
        self.defaults = sampling_defaults(checkpoint)
        """Sampling parameters that the checkpoint recommends, for requests that do not say."""
        tokenizer = tokenizer_folder(llm.llm.runtime.tokenizer, checkpoint)
        self.chat_texts = ChatTexts(tokenizer)
        """The conversations, as the chat template writes them."""
        self._running = 0

    @property
    def capacity(self) -> int:
        """Most tokens of a prompt and its output."""
        return self.llm.llm.engine.capacity

    def check_model(self, name: str | None) -> str:
        """Return the name that the answer has; raise `RefusedError` for a model that is not
        served.
        """
        if name is not None and name not in self.models:
            known = ", ".join(self.models)
            raise RefusedError(
                f"the model {name!r:.100} is not served here, but {known}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name or self.settings.names[0]

    @property
    def models(self) -> list[str]:
        """The names that requests may have for a model: its own, and those of its adapters."""
        return [*self.settings.names, *self.llm.llm.engine.adapters]

    def adapter(self, model: str) -> str | None:
        """Return the adapter that a model's name stands for, None for the model itself."""
        return model if model in self.llm.llm.engine.adapters else None

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> Prompt:
        """Return a conversation as the checkpoint's chat template writes it, with its images and
        sounds.

        Raises `UsageError` for images and sounds that cannot be had, or that the model does not
        take.
        """
        if (tokenizer := self.llm.llm.engine.tokenizer) is not None:
            tokenizer.check_template()  # no process has to be asked for that
        texts, parts = split_media(messages)
        media = await self._media(parts) if parts else None
        try:
            written = await self.chat_texts.write(texts, tools, options)
        except UsageError:
            raise
        except OnboardError as error:  # what it was given is the client's
            raise RefusedError(" ".join(str(error).split()), param="messages") from error
        if media is not None:
            read = await self.llm.prepare(written.text, media)
            return Prompt(read.tokens, written.text, written.turn, read.inputs)
        tokens = await self.llm.tokenize_plain(written.text)
        return Prompt(tokens, written.text, written.turn)

    async def _media(self, parts: Sequence[MediaPart]) -> PromptMedia:
        """Read images and sounds; a model that takes none says so before anything is fetched."""
        async with self.admitted():
            try:
                await asyncio.to_thread(lambda: self.llm.llm.prompts.processor)
            except ConsentRequiredError:  # which is not a client's to give
                raise RefusedError("the model takes text alone", param="messages") from None
            return await self.llm.read_media(parts)

    def answer_format(self, tools: Sequence[str]) -> Format:
        """Return how the model writes thoughts and calls."""
        return format_for(self.llm.llm.engine.tokenizer, tools)

    @cached_property
    def special_texts(self) -> list[str]:
        """Texts of special tokens, which no client sees in an answer."""
        tokenizer = self.llm.llm.engine.tokenizer
        return [] if tokenizer is None else list(tokenizer.hf.all_special_tokens)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, if it has one."""
        return self.llm.llm.engine.tokenizer

    def text_of(self, tokens: list[int]) -> str:
        """Return the text of tokens, special ones left out."""
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens)

    def token_text(self, token: int) -> str:
        """Return the text of one token, special ones too; without a tokenizer, its number."""
        if self.tokenizer is None:
            return str(token)
        return self.tokenizer.decode([token], skip_special_tokens=False)

    async def follow(
        self, prompt: Prompt, params: SamplingParams, number: int = 0
    ) -> AsyncGenerator[Delta, None]:
        """Generate for prompt `number` of a request that is admitted, and yield what comes; leaving
        cancels it. Who asks for the next delta has written all of the last one.

        Raises `UsageError` for a prompt that is too long.
        """
        watch = self.metrics.watch(len(prompt.tokens), params)
        scope = request_scope()
        try:
            given = {"prompt_token_ids": prompt.tokens, "processed": prompt.inputs}
            sent = scope.sent_of(number, params.n)
            each = scope.done is not None  # who goes on has to divide the answer as it was
            stream = self.llm.stream(given, params, generated=sent, each_step=each)
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    place = number, delta.index
                    watch.took(0 if scope.is_sent(place) else len(delta.token_ids))
                    if delta.finish_reason is not None:
                        watch.ended(delta.finish_reason)
                    yield delta
                    scope.took(place, delta.token_ids)
        finally:
            watch.done()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Count a request as running; raise `RefusedError` if too many do."""
        if self._running >= self.settings.max_running:
            raise RefusedError(
                f"{self._running} requests are being answered, as many as are taken; come again",
                status=429,
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def start(self) -> None:
        """Start what a conversation would wait for."""
        tokenizer = self.llm.llm.engine.tokenizer
        if tokenizer is not None and tokenizer.has_template:
            self.chat_texts.start()

    def close(self) -> None:
        """End what the service has started besides the model."""
        self.chat_texts.close()


def sampling_defaults(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint's generation_config.json recommends."""
    path = checkpoint / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    if not isinstance(values, dict) or not values.get("do_sample", False):
        return {}
    return {name: values[name] for name in _SAMPLING if values.get(name) is not None}

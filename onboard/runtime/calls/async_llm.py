"""`AsyncLLM`: one model for many callers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from onboard.media.prompt_media import MediaPart, PromptMedia, read_media
from onboard.runtime.calls.engine_thread import EngineThread, Ticket
from onboard.runtime.calls.loop_news import LoopNews, News, all_news, each_delta, together
from onboard.runtime.calls.outputs import Delta, RequestOutput, request_output
from onboard.runtime.calls.pooling import Pooling, pooled
from onboard.runtime.calls.prompt_forms import Prompt, as_params, text_or_tokens
from onboard.runtime.calls.prompt_reader import NO_MEDIA, ReadPrompt, parts_of
from onboard.runtime.constraints.structured import Matcher
from onboard.runtime.llm import LLM, Messages
from onboard.runtime.sampling_params import SamplingParams

_MEDIA_THREADS = 4
_GRAMMAR_THREADS = 2


class AsyncLLM:
    """A model whose prompts run in one batch, whoever gives them and when.

    It takes the arguments of `LLM`, and raises what it raises. All methods may be called from any
    event loop and thread. `close` it at the end, or use it as `async with AsyncLLM(...) as llm`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._share(LLM(*args, **options))

    @classmethod
    def over(cls, llm: LLM) -> AsyncLLM:
        """Return the same model for many callers; `llm` itself is not to be called any more."""
        made = cls.__new__(cls)
        made._share(llm)
        return made

    def _share(self, llm: LLM) -> None:
        self.llm = llm
        self.thread = EngineThread(llm.engine)
        self._news: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopNews] = WeakKeyDictionary()
        self.thread.when_told.append(self._wake)
        self._tokenizing = Lock()
        # Of its own: who waits for a slow host holds up nobody else.
        self._media_pool = ThreadPoolExecutor(_MEDIA_THREADS, "onboard-media")
        # Grammars of clients may be large: other requests are computed and read meanwhile.
        self._grammar_pool = ThreadPoolExecutor(_GRAMMAR_THREADS, "onboard-grammars")

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(timeout=0)

    async def close(self, timeout: float | None = None) -> bool:
        """Take no more prompts, and wait for those that run, at most `timeout` seconds; return
        whether all had ended.
        """
        ended = await asyncio.to_thread(self.thread.close, timeout=timeout)
        await asyncio.to_thread(self.llm.close)
        for pool in (self._media_pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        return ended

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        lora: str | None = None,
        generated: Sequence[Sequence[int]] = (),
        each_step: bool = False,
    ) -> AsyncGenerator[Delta, None]:
        """Generate for one prompt, with an adapter if `lora` names one; yield each output's new text
        and tokens as they come. Who comes late gets all that waits at once, unless what each step
        brought is wanted for itself (`each_step`).

        `generated` are the tokens that a stream elsewhere had brought when it was cut off, of each
        output: they come first (with `each_step` one by one), and what follows is what would have
        followed there. Who leaves the loop, or is cancelled, cancels the rest. Raises `UsageError` for a prompt
        that is empty, too long or has unknown tokens.
        """
        ticket = await self._ticket(prompt, sampling_params, priority, lora)
        ticket.generated = generated
        async with aclosing(self._follow(ticket, each_step=each_step)) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> RequestOutput:
        """Generate for one prompt; return its outputs when all have ended."""
        ticket = await self._ticket(prompt, sampling_params, priority, lora)
        async with aclosing(self._follow(ticket)) as deltas:
            async for _ in deltas:
                pass
        assert ticket.follower is not None
        return request_output(ticket.text, list(ticket.prompt), ticket.follower.outputs)

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str | None = None,
    ) -> RequestOutput:
        """Answer one conversation, written as the checkpoint's chat template says."""
        prompt = await asyncio.to_thread(self._alone_prompt, messages, tools, chat_template_kwargs)
        return await self.generate(prompt, sampling_params, lora=lora)

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        return await asyncio.to_thread(self._encode, text)

    async def tokenize_plain(self, text: str) -> list[int]:
        """Return the token ids of a text that has its special tokens already."""

        def alone() -> list[int]:
            tokenizer = self.llm.engine.tokenizer
            with self._tokenizing:
                return [] if tokenizer is None else tokenizer.encode_plain(text)

        return await asyncio.to_thread(alone)

    async def score(
        self, prompt: list[int], count: int = 0, lora: str | None = None
    ) -> list[dict[int, float] | None]:
        """Return for each token of a prompt but the first its log-probability, and those of the
        `count` most likely ones.
        """
        params = SamplingParams(max_tokens=1, prompt_logprobs=count, lora=lora)
        found = (await self.generate(prompt, params)).prompt_logprobs
        assert found is not None
        return found

    async def embed(
        self,
        prompt: list[int] | str,
        pooling: Pooling = "last",
        *,
        normalize: bool = True,
        lora: str | None = None,
    ) -> torch.Tensor:
        """Return a vector of one prompt's last hidden states, [hidden]; see `LLM.embed`."""
        tokens = await asyncio.to_thread(self._encode, prompt)
        states = await asyncio.wrap_future(self.thread.hidden_states(tokens, lora))
        return pooled(states, pooling, normalize=normalize)

    async def read_media(self, parts: Sequence[MediaPart]) -> PromptMedia:
        """Read and decode the images and sounds of one prompt; see `onboard.media.read_media`."""
        loop, limits = asyncio.get_running_loop(), self.llm.prompts.limits
        return await loop.run_in_executor(self._media_pool, read_media, parts, limits)

    async def prepare(self, text: str, media: PromptMedia) -> ReadPrompt:
        """Return a prompt with images and sounds that are decoded, ready to be generated for."""
        return await asyncio.to_thread(self._read, {"prompt": text}, media)

    async def _read_all(self, prompt: Prompt) -> ReadPrompt:
        if parts := parts_of(prompt):
            return await asyncio.to_thread(self._read, prompt, await self.read_media(parts))
        if isinstance(text_or_tokens(prompt), str):
            return await asyncio.to_thread(self._read, prompt, NO_MEDIA)
        return self.llm.prompts.read(prompt)

    def _read(self, prompt: Prompt, media: PromptMedia) -> ReadPrompt:
        with self._tokenizing:
            return self.llm.prompts.read(prompt, media)

    def _alone_prompt(self, *args: Any) -> Prompt:
        with self._tokenizing:
            return self.llm.chat_prompt(*args)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        # The Rust tokenizers refuse a second caller while one is inside.
        with self._tokenizing:
            return self.llm.encode(prompt)

    async def _ticket(
        self, prompt: Prompt, params: SamplingParams | None, priority: int, lora: str | None
    ) -> _AsyncTicket:
        read = await self._read_all(prompt)
        news: News = asyncio.Queue()
        loop = asyncio.get_running_loop()
        tell = partial(self._news.setdefault(loop, LoopNews(loop)).tell, news)
        one = as_params(params, 1, lora)[0]
        grammar = await self._grammar(one)
        ticket = _AsyncTicket(
            read.tokens, one, tell, read.inputs, priority, news=news, text=read.text
        )
        ticket.grammar = grammar
        return ticket

    def _wake(self) -> None:
        for news in list(self._news.values()):
            news.wake()

    async def _grammar(self, params: SamplingParams) -> Matcher | None:
        grammars, wanted = self.llm.engine.grammars, params.structured_outputs
        if wanted is None or not self.thread.is_alive:  # the thread will say so
            return None

        def read() -> Matcher | None:
            with self._tokenizing:
                _ = grammars.tokens
            return grammars.matcher(wanted)

        return await asyncio.get_running_loop().run_in_executor(self._grammar_pool, read)

    async def _follow(
        self, ticket: _AsyncTicket, *, each_step: bool = False
    ) -> AsyncGenerator[Delta, None]:
        self.thread.submit(ticket)
        ended: set[int] = set()
        try:
            while len(ended) < ticket.params.n:
                deltas = each_delta(await all_news(ticket.news))
                for delta in deltas if each_step else together(deltas):
                    ended |= {delta.index} if delta.finish_reason is not None else set()
                    yield delta
        finally:
            if len(ended) < ticket.params.n:
                self.thread.cancel(ticket)


class _AsyncTicket(Ticket):
    """A ticket whose news an event loop waits for."""

    def __init__(self, *args: Any, news: News, text: str | None) -> None:
        super().__init__(*args)
        self.news, self.text = news, text

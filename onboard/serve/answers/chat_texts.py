"""Conversations as text, by the checkpoint's chat template, in a process of its own.

The template is a program of the checkpoint's author. In a process whose main thread runs it, its
time and memory are limited without a limit for the model beside it, and a process that does not
answer is ended.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.runtime.tokenizer import Tokenizer
from onboard.untrusted.bounds import TEMPLATE_SECONDS

_START_SECONDS = 60.0
"""For the libraries that the process imports."""
_worker: Tokenizer | None = None
"""The process's tokenizer."""


@dataclass(frozen=True)
class ChatText:
    """A conversation as text."""

    text: str
    turn: str
    """The end of `text` that begins the model's turn."""


class ChatTexts:
    """Writes conversations in a process that is started anew when it breaks."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._pool: ProcessPoolExecutor | None = None
        self._warm = False

    async def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> ChatText:
        """Return the text of messages, up to the beginning of the answer.

        Raises `UsageError` without a template, `OnboardError` if it fails or exceeds the limits of
        time, memory or text.
        """
        functions = None if tools is None else [dict(each) for each in tools]
        given = [dict(each) for each in messages], functions, dict(options)
        seconds = TEMPLATE_SECONDS.most * 4 + (0 if self._warm else _START_SECONDS)
        loop = asyncio.get_running_loop()
        try:
            written = loop.run_in_executor(self._started(), _write, *given)
            text = await asyncio.wait_for(written, seconds)
        except (TimeoutError, BrokenProcessPool) as error:
            self.close()
            raise OnboardError("the chat template does not come to an end") from error
        self._warm = True
        return text

    def close(self) -> None:
        """End the process."""
        if (pool := self._pool) is not None:
            self._pool, self._warm = None, False
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), _load, (str(self._checkpoint),)
            )
        return self._pool


def _load(checkpoint: str) -> None:
    global _worker
    _worker = Tokenizer.load(Path(checkpoint))


def _write(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
) -> ChatText:
    if _worker is None:
        raise OnboardError("the checkpoint has no tokenizer")
    return chat_text(_worker, messages, tools, options)


def chat_text(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: Mapping[str, Any],
) -> ChatText:
    """Return the text of messages; raises what `Tokenizer.chat` raises."""
    text = tokenizer.chat(messages, tools, **options)
    if not options.get("add_generation_prompt", True):
        return ChatText(text, "")
    before = tokenizer.chat(messages, tools, **{**options, "add_generation_prompt": False})
    shared = next(
        (i for i, pair in enumerate(zip(text, before, strict=False)) if pair[0] != pair[1]),
        min(len(text), len(before)),
    )
    return ChatText(text, text[shared:])

"""Conversations as text, for many clients: the checkpoint's chat template writes one after the
other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from onboard.errors import OnboardError
from onboard.serve.answers.template_process import ChatText, Given, TemplateProcess


class ChatTexts:
    """Writes conversations in a process of its own, which is started anew when it breaks."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._process: TemplateProcess | None = None
        self._is_closed = False
        self._door = Lock()
        """Held while the process is exchanged."""
        self._turn = asyncio.Lock()
        """Held by the conversation that is written."""

    @property
    def pid(self) -> int | None:
        """The process's number; None before it is started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, without a wait for what it has to load."""
        with self._door:
            if self._process is None and not self._is_closed:
                self._process = TemplateProcess(self._checkpoint)

    async def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> ChatText:
        """Return the text of messages, up to the beginning of the answer.

        Who is cancelled gives up the place in the row, and ends no process: what is written for
        nobody is waited for by the next. Raises `UsageError` without a template, `OnboardError` if
        it fails or exceeds the limits of time, memory or text.
        """
        functions = None if tools is None else [dict(each) for each in tools]
        given = [dict(each) for each in messages], functions, dict(options)
        await self._turn.acquire()
        written = asyncio.ensure_future(asyncio.to_thread(self._write, given))
        written.add_done_callback(self._next)
        return await asyncio.shield(written)

    def close(self) -> None:
        """End the process; none is started any more."""
        with self._door:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _write(self, given: Given) -> ChatText:
        self.start()
        process = self._process
        if process is None:
            raise OnboardError("the server ends")
        try:
            return process.write(given)
        except (EOFError, OSError) as error:
            self._renew(process)
            raise OnboardError("the chat template does not come to an end") from error

    def _renew(self, broken: TemplateProcess) -> None:
        with self._door:
            if self._process is broken:
                self._process = None
                broken.close()
        self.start()

    def _next(self, written: asyncio.Future[ChatText]) -> None:
        self._turn.release()
        if not written.cancelled():
            written.exception()  # of a client that has gone it is nobody's

"""The process in which a checkpoint's chat template runs.

The template is a program of the checkpoint's author. In a process whose main thread runs it, its
time and memory are limited without a limit for the model beside it, and one that does not answer is
ended. What comes back is data alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError, UsageError
from onboard.parallel.links import when_closed
from onboard.runtime.tokenizer import Tokenizer
from onboard.untrusted.bounds import TEMPLATE_SECONDS, TEXT_BYTES

Given = tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]
"""Messages, functions and options of the template."""
_START_SECONDS = 60.0
"""For the libraries that the process imports."""
_RENDERINGS = 4
"""At most, of one conversation."""
_REPLY_BYTES = 32 * TEXT_BYTES.most
"""Of a text and its end, each character as twelve at most."""
_READY = b"ready"


@dataclass(frozen=True)
class ChatText:
    """A conversation as text."""

    text: str
    turn: str
    """The end of `text` that begins the model's turn."""


class TemplateProcess:
    """One process, from its start to its end. It serves one caller at a time, and ends with the
    process that has started it.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, str(checkpoint)), name="onboard-template", daemon=True
        )
        self._process.start()
        theirs.close()
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return self._process.pid

    def write(self, given: Given) -> ChatText:
        """Return a conversation as text.

        Raises `UsageError` without a template, `OnboardError` if it fails or exceeds the limits of
        time, memory or text, and `OSError` or `EOFError` if the process does not answer.
        """
        if not self._is_ready:
            self._is_ready = self._reply(_START_SECONDS) == _READY
        self._connection.send(given)
        reply = json.loads(self._reply(TEMPLATE_SECONDS.most * _RENDERINGS))
        if "error" in reply:
            kind = UsageError if reply["is_usage"] else OnboardError
            raise kind(reply["error"], hint=reply["hint"])
        return ChatText(**reply)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _reply(self, seconds: float) -> bytes:
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv_bytes(_REPLY_BYTES)


def _serve(connection: Connection, checkpoint: str) -> None:
    """Write the conversations that are asked for until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the server decides what ends
    when_closed(connection, 0.0, lambda: os._exit(1))
    tokenizer = Tokenizer.load(Path(checkpoint))
    connection.send_bytes(_READY)
    while True:
        try:
            given: Given = connection.recv()
        except (EOFError, OSError):
            return
        connection.send_bytes(json.dumps(_answer(tokenizer, given)).encode())


def _answer(tokenizer: Tokenizer | None, given: Given) -> dict[str, Any]:
    try:
        if tokenizer is None:
            raise UsageError("the checkpoint has no tokenizer")
        return asdict(chat_text(tokenizer, *given))
    except OnboardError as error:
        usage = isinstance(error, UsageError)
        return {"error": error.message, "hint": error.hint, "is_usage": usage}


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

"""A request put to the application of a replica, in its own process (https://asgi.readthedocs.io)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message

from onboard.serve.replicas.passed_on import Asked, Head, Part
from onboard.serve.request_scope import Place, RequestScope, in_scope

_KEPT = (b"content-type", b"retry-after", b"allow")
"""Headers that are the application's own affair."""


class ReplicaCall:
    """One request and its answer."""

    def __init__(self, app: ASGIApp, asked: Asked, replica: str) -> None:
        self._app, self._asked, self._replica = app, asked, replica
        self._news: asyncio.Queue[Head | Part | None] = asyncio.Queue()
        self._body = b""
        """What is written, until it is known which tokens it is of."""
        self._tokens: list[tuple[Place, list[int]]] = []
        self._is_read = False

    async def parts(self) -> AsyncGenerator[Head | Part, None]:
        """Yield the answer; who leaves cancels the rest."""
        task = asyncio.ensure_future(self._run())
        try:
            while (part := await self._news.get()) is not None:
                yield part
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        asked = self._asked
        try:
            with in_scope(RequestScope(asked.key, asked.created, asked.sent, self._took)):
                await self._app(_scope(asked), self._receive, self._send)
        finally:
            self._tell()
            self._news.put_nowait(None)

    async def _receive(self) -> Message:
        if self._is_read:
            await asyncio.Event().wait()  # who goes away cancels the call
        self._is_read = True
        return {"type": "http.request", "body": self._asked.body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message["headers"] if name in _KEPT]
            self._news.put_nowait(Head(self._replica, message["status"], headers))
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    def _took(self, place: Place, tokens: list[int], sent: bool) -> None:
        """Tell what was written, now that all is there that the tokens bring."""
        if sent:
            self._body = b""  # the client has it
            return
        self._tokens.append((place, tokens))
        if self._body:
            self._tell()

    def _tell(self) -> None:
        if self._body or self._tokens:
            self._news.put_nowait(Part(self._body, self._tokens))
        self._body, self._tokens = b"", []


def _scope(asked: Asked) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }

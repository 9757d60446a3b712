"""The application in front of the replicas: doors, limits, and every request sent on."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from onboard import __version__
from onboard.serve.app import add_refusals, refuse
from onboard.serve.chat_page import add_page
from onboard.serve.connected import while_connected
from onboard.serve.dialects.events import event, told
from onboard.serve.doors import MESSAGES, Bodies, Door
from onboard.serve.refusals import RefusedError
from onboard.serve.replicas.metrics_of_replicas import labelled, metrics_text
from onboard.serve.replicas.passed_on import Asked, Head
from onboard.serve.replicas.sending import Sender
from onboard.serve.serve_settings import ServeSettings

Life = Callable[[FastAPI], AbstractAsyncContextManager[None]]
_METRICS_SECONDS = 5.0
"""That a replica has to tell its counts."""


def create_front(sender: Sender, settings: ServeSettings, life: Life | None = None) -> FastAPI:
    """Return the application; `life` is entered while it runs.

    What it does not know itself, the replicas know: their paths, descriptions and refusals.
    """
    app = FastAPI(
        title="onboard", version=__version__, lifespan=life, openapi_url=None, docs_url=None
    )
    add_refusals(app)
    app.add_middleware(Door, settings=settings)
    add_page(app)
    _add_facts(app, sender)
    _add_rest(app, sender, Bodies(settings))
    return app


def _add_facts(app: FastAPI, sender: Sender) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if sender.replicas.live else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        names = sorted(sender.replicas.live)
        found = await asyncio.gather(*(_metrics_of(sender, name) for name in names))
        texts = {name: text for each in found for name, text in each.items()}
        return PlainTextResponse(metrics_text(sender.registry, labelled(texts)))


async def _metrics_of(sender: Sender, name: str) -> dict[str, str]:
    """Return the counts of a replica, by its name; nothing of one that does not answer."""
    asked, found, answered = _asked("GET", "/metrics", b""), b"", ""
    try:
        async with (
            asyncio.timeout(_METRICS_SECONDS),
            aclosing(sender.replicas.ask(asked, name)) as parts,
        ):
            async for part in parts:
                if isinstance(part, Head):
                    answered = part.replica
                else:
                    found += part.body
    except Exception:  # one that is lost meanwhile has no counts
        return {}
    return {answered: found.decode()}


def _add_rest(app: FastAPI, sender: Sender, bodies: Bodies) -> None:
    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def send_on(request: Request) -> Response:
        try:
            body = await bodies.read(request) if request.method == "POST" else b""
            answer = sender.answer(_asked(request.method, request.url.path, body))
            return await _response(request, answer)
        except Exception as error:
            return await refuse(request, error)


async def _response(request: Request, answer: AsyncGenerator[Any, None]) -> Response:
    try:
        head = await while_connected(request, anext(answer))
        headers = {name.decode(): value.decode() for name, value in head.headers}
        if head.streams:
            rest = _guarded(answer, request.url.path)
            return StreamingResponse(rest, head.status, headers)
        return Response(await while_connected(request, _whole(answer)), head.status, headers)
    except BaseException:
        await answer.aclose()
        raise


def _asked(method: str, path: str, body: bytes) -> Asked:
    return Asked(method, path, body, secrets.token_hex(16), int(time.time()))


async def _whole(answer: AsyncGenerator[Any, None]) -> bytes:
    async with aclosing(answer) as parts:
        return b"".join([part async for part in parts])


async def _guarded(answer: AsyncGenerator[Any, None], path: str) -> AsyncIterator[bytes]:
    """Yield the rest of a stream; where no replica goes on with it, the last event tells."""
    async with aclosing(answer) as parts:
        try:
            async for part in parts:
                yield part
        except Exception as error:
            yield _broken(told(error), path)


def _broken(refusal: RefusedError, path: str) -> bytes:
    if path.startswith(MESSAGES):
        return event(refusal.body_of_messages(), "error")
    if path.startswith("/v1/responses"):
        return event({"type": "error", **refusal.body()["error"]}, "error")
    return event(refusal.body())

"""The application: routes, doors and limits."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from onboard import __version__
from onboard.errors import OnboardError
from onboard.serve.dialects.anthropic_messages import Messages, MessagesBody
from onboard.serve.dialects.events import guarded, told
from onboard.serve.dialects.paths import DIALECTS, Dialect
from onboard.serve.dialects.tokens import DetokenizeBody, TokenizeBody
from onboard.serve.refusals import RefusedError
from onboard.serve.service import Service

_OPEN = ("/health", "/version", "/metrics", "/")
"""Paths that need no key."""


def create_app(service: Service) -> FastAPI:
    """Return the application for a service, which it closes at its end."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.llm.close(timeout=service.settings.drain_seconds)
        service.close()

    app = FastAPI(title="onboard", version=__version__, lifespan=life)
    for kind in (RefusedError, OnboardError, HTTPException):
        app.add_exception_handler(kind, _refuse)
    if service.settings.api_key is not None:
        app.add_middleware(Door, key=service.settings.api_key)
    _add_facts(app, service)
    _add_generation(app, service)
    _add_counts(app, service)
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = RefusedError(str(error.detail), status=error.status_code)
    return _refusal(error)


def _refusal(error: Exception) -> Response:
    refusal = told(error)
    headers = {"Retry-After": "1"} if refusal.status == 429 else None
    return JSONResponse(refusal.body(), refusal.status, headers)


def _refusal_of_messages(error: Exception) -> Response:
    """Return an error in Anthropic's form."""
    refusal = told(error)
    body = {"type": "error", "error": {"type": refusal.kind, "message": refusal.message}}
    return JSONResponse(body, refusal.status)


class Door:
    """Lets in who shows the key, as OpenAI's or as Anthropic's clients do."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 in the application's place where the key is wrong."""
        if scope["type"] == "http" and scope["path"] not in _OPEN and not self._shows(scope):
            refusal = _refusal(RefusedError("the API key is wrong, or missing", status=401))
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _shows(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        shown = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        return secrets.compare_digest(shown or headers.get(b"x-api-key", b""), self._key)


async def _body(request: Request, most: int) -> bytes:
    """Return the body; raise `RefusedError` for one that is too long, before it is read."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise RefusedError(f"the body has more than {most:,} bytes", status=413)
        parts.append(part)
    return b"".join(parts)


def _add_facts(app: FastAPI, service: Service) -> None:
    """Add what tells of the server itself."""

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.llm.thread.is_alive else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        found = [_model(service, name) for name in service.settings.names]
        return {"object": "list", "data": found, "models": found}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(service, service.check_model(name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "onboard",
        "root": service.settings.names[0],
        "max_model_len": service.capacity,
    }


def _add_generation(app: FastAPI, service: Service) -> None:
    """Add what generates text."""

    def add(path: str, dialect: Dialect) -> None:
        body = dialect.body
        schema = {"content": {"application/json": {"schema": body.model_json_schema()}}}

        @app.post(path, openapi_extra={"requestBody": {**schema, "required": True}})
        async def generate(request: Request) -> Response:
            try:
                read = body.read(await _body(request, service.settings.max_body_bytes))
                one = dialect.asked(service, read)
                await one.prepare()
                if read.stream:
                    return await _streamed(request, one.events())
                return JSONResponse(await _while_connected(request, one.whole()))
            except Exception as error:
                return _refusal_of_messages(error) if dialect.is_anthropics else _refusal(error)

    for path, dialect in DIALECTS.items():
        add(path, dialect)


def _add_counts(app: FastAPI, service: Service) -> None:
    """Add what tells of tokens."""
    most = service.settings.max_body_bytes

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        try:
            one = Messages(service, MessagesBody.read(await _body(request, most)))
            await one.prepare()
            return JSONResponse(one.counted())
        except Exception as error:
            return _refusal_of_messages(error)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        try:
            body = TokenizeBody.read(await _body(request, most))
            return JSONResponse(await body.tokenized(service))
        except Exception as error:
            return _refusal(error)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        try:
            body = DetokenizeBody.read(await _body(request, most))
            return JSONResponse(body.detokenized(service))
        except Exception as error:
            return _refusal(error)


async def _streamed(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """Return a stream; its first event is waited for, so that what is wrong has its status."""
    try:
        first = await _while_connected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return StreamingResponse(guarded(first, events), media_type="text/event-stream")


async def _while_connected(request: Request, work: Any) -> Any:
    """Return what `work` returns; cancel it when the client goes away."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RefusedError("the client went away", status=499)
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""The application: routes, doors and limits."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from onboard import __version__
from onboard.errors import OnboardError
from onboard.serve.chat_page import add_page
from onboard.serve.connected import while_connected
from onboard.serve.described_api import LIFE, REFUSALS, STREAM, request_body
from onboard.serve.dialects.anthropic_messages import Messages, MessagesBody
from onboard.serve.dialects.events import guarded, told
from onboard.serve.dialects.fields import Body
from onboard.serve.dialects.paths import DIALECTS, Asked, Dialect
from onboard.serve.dialects.tokens import DetokenizeBody, TokenizeBody
from onboard.serve.doors import Bodies, Door, refusal_response
from onboard.serve.refusals import RefusedError
from onboard.serve.service import Service

_TURN = 5e-4
"""Seconds that a thread keeps the interpreter while another one wants it: Python's own 5 ms are a
decode step, for which the engine's thread would wait while events are written.
"""
Count = Callable[[bytes], Awaitable[dict[str, Any]]]
"""Tells of the tokens of a body."""


def create_app(service: Service) -> FastAPI:
    """Return the application for a service, which it closes at its end."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        before = sys.getswitchinterval()
        sys.setswitchinterval(_TURN)
        try:
            yield
            await service.llm.close(timeout=service.settings.drain_seconds)
        finally:
            sys.setswitchinterval(before)
            service.close()

    # Pages of the documentation would load scripts of others.
    app = FastAPI(
        title="onboard", version=__version__, lifespan=life, docs_url=None, redoc_url=None
    )
    add_refusals(app)
    app.add_middleware(Door, settings=service.settings)
    bodies = Bodies(service.settings)
    add_page(app)
    _add_facts(app, service)
    _add_generation(app, service, bodies)
    _add_counts(app, service, bodies)
    return app


def add_refusals(app: FastAPI) -> None:
    """Have errors of an application told in the words of the interface that was asked."""
    for kind in (RefusedError, OnboardError, HTTPException):
        app.add_exception_handler(kind, refuse)


async def refuse(request: Request, error: Exception) -> Response:
    """Return what a client is told of an error."""
    if isinstance(error, HTTPException):
        error = RefusedError(str(error.detail), status=error.status_code)
    return refusal_response(told(error), request.url.path)


def _add_facts(app: FastAPI, service: Service) -> None:
    """Add what tells of the server itself."""

    @app.get("/health", response_class=Response, responses=LIFE)
    async def health() -> Response:
        return Response(status_code=200 if service.llm.thread.is_alive else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        found = [_model(service, name) for name in service.models]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
        return {"object": "list", "data": found, "models": found, **ends}

    @app.get("/v1/models/{name:path}", responses=REFUSALS)
    async def model(name: str) -> dict[str, Any]:
        return _model(service, service.check_model(name))


def _model(service: Service, name: str) -> dict[str, Any]:
    """Return a model in OpenAI's words and in Anthropic's."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.started,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
        "owned_by": "onboard",
        "root": service.settings.names[0],
        "parent": service.settings.names[0] if service.adapter(name) else None,
        "max_model_len": service.capacity,
    }


def _add_generation(app: FastAPI, service: Service, bodies: Bodies) -> None:
    """Add what generates text."""

    def add(path: str, dialect: Dialect) -> None:
        body = dialect.body
        extra = request_body(path, body)

        @app.post(path, openapi_extra=extra, responses={**STREAM, **REFUSALS})
        async def generate(request: Request) -> Response:
            try:
                read = body.read(await bodies.read(request))
                one = dialect.asked(service, read)
                await while_connected(request, one.prepare())
                if read.stream:
                    return await _streamed(request, one)
                return JSONResponse(await while_connected(request, one.whole()))
            except Exception as error:
                return await refuse(request, error)

    for path, dialect in DIALECTS.items():
        add(path, dialect)


def _add_counts(app: FastAPI, service: Service, bodies: Bodies) -> None:
    """Add what tells of tokens."""

    def add(path: str, form: type[Body], count: Count) -> None:
        @app.post(path, openapi_extra=request_body(path, form), responses=REFUSALS)
        async def counted(request: Request) -> Response:
            try:
                counting = count(await bodies.read(request))
                return JSONResponse(await while_connected(request, counting))
            except Exception as error:
                return await refuse(request, error)

    async def of_messages(body: bytes) -> dict[str, Any]:
        one = Messages(service, MessagesBody.read(body))
        await one.prepare()
        return one.counted()

    async def of_text(body: bytes) -> dict[str, Any]:
        found: dict[str, Any] = await TokenizeBody.read(body).tokenized(service)
        return found

    async def of_tokens(body: bytes) -> dict[str, Any]:
        found: dict[str, Any] = DetokenizeBody.read(body).detokenized(service)
        return found

    add("/v1/messages/count_tokens", MessagesBody, of_messages)
    add("/tokenize", TokenizeBody, of_text)
    add("/detokenize", DetokenizeBody, of_tokens)


async def _streamed(request: Request, one: Asked) -> Response:
    """Return a stream; its first event is waited for, so that what is wrong has its status."""
    events = one.events()
    try:
        first = await while_connected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return StreamingResponse(guarded(first, events, one.failed), media_type="text/event-stream")

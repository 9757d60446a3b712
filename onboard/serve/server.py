"""Starts a server and stays with it until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from onboard.errors import OnboardError, UsageError
from onboard.runtime.calls.async_llm import AsyncLLM
from onboard.runtime.resolve import find_checkpoint
from onboard.serve.app import create_app
from onboard.serve.serve_settings import ServeSettings
from onboard.serve.service import Service

_WAITING = 2048
"""Connections that wait to be taken."""


def load_service(model: str, told: ServeSettings, **options: Any) -> Service:
    """Load a model; `options` are those of `LLM`."""
    llm = AsyncLLM(model, **options)
    check_names(told, llm.llm.engine.adapters)
    return Service(llm, told, find_checkpoint(llm.llm.runtime))


def check_names(told: ServeSettings, adapters: Collection[str]) -> None:
    """Raise `UsageError` for an adapter that is called as the model."""
    if taken := [name for name in adapters if name in told.names]:
        raise UsageError(
            f"the model and an adapter are both called {taken[0]!r}", hint="Rename one: --name"
        )


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket at the address, on which clients may wait already.

    Raises `UsageError` if the address is not free, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    door = socket.socket(family)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((settings.host, settings.port))
    except OSError as error:
        door.close()
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}",
            hint="Choose another with --host and --port",
        ) from None
    door.listen(_WAITING)
    return door


def serve(service: Service, door: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM; those that run then may end, in
    `settings.drain_seconds`. Raises `OnboardError` where they had not ended by then, or where other
    ranks of the model have failed.
    """
    server, ranks = Server(create_app(service), service.settings), service.llm.llm.ranks
    if ranks is not None:
        ranks.workers.when_failed.append(lambda: setattr(server, "should_exit", True))
    server.stay(door)
    if ranks is not None and (failure := ranks.workers.failure) is not None:
        raise failure


class Server(uvicorn.Server):
    """Serves an application, and counts the requests that it cuts off at its end."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self.num_cut = app, 0
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            timeout_graceful_shutdown=int(settings.drain_seconds),
            access_log=settings.log_prompts,
            log_level=logging.WARNING,
        )
        super().__init__(config)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # nobody else cancels; raised, it is a traceback in the log
            self.num_cut += 1

    def stay(self, door: socket.socket) -> None:
        """Run to the end; raise `OnboardError` if requests were cut off.

        SIGTERM is what an orderly end is asked for with, so it is none that the process dies of.
        """
        with _termination_is_an_end():
            self.run(sockets=[door])
        if self.num_cut:
            seconds = self.config.timeout_graceful_shutdown
            raise OnboardError(
                f"requests that were cut off after {seconds} seconds: {self.num_cut}",
                hint="Give them longer: --drain-seconds",
            )


@contextmanager
def _termination_is_an_end() -> Iterator[None]:
    """Ignore the signal that uvicorn sends to its own process behind an orderly end."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def describe(told: ServeSettings, door: socket.socket) -> Mapping[str, str]:
    """Return what a user is told when the server has started."""
    host, port = door.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return {
        "address": f"http://{shown}:{port}/v1",
        "model": told.names[0],
    }

"""Starts a server and stays with it until it is told to stop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Mapping
from typing import Any

import uvicorn

from onboard.errors import UsageError
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
    `settings.drain_seconds`. Raises `OnboardError` where other ranks of the model have failed.
    """
    settings = service.settings
    config = uvicorn.Config(
        create_app(service),
        timeout_graceful_shutdown=int(settings.drain_seconds),
        access_log=settings.log_prompts,
        log_level=logging.WARNING,
    )
    server, ranks = uvicorn.Server(config), service.llm.llm.ranks
    if ranks is not None:
        ranks.workers.when_failed.append(lambda: setattr(server, "should_exit", True))
    server.run(sockets=[door])
    if ranks is not None and (failure := ranks.workers.failure) is not None:
        raise failure


def describe(service: Service, door: socket.socket) -> Mapping[str, Any]:
    """Return what a user is told when the server has started."""
    host, port = door.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return {
        "address": f"http://{shown}:{port}/v1",
        "model": service.settings.names[0],
        "facts": list(service.llm.llm.engine.facts),
    }

"""A front on this machine, and replicas on a cluster, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from onboard.errors import OnboardError
from onboard.serve.replicas.front import create_front
from onboard.serve.replicas.ray_fleet import FleetSettings, RayFleet, fleet
from onboard.serve.replicas.sending import Sender
from onboard.serve.serve_settings import ServeSettings
from onboard.serve.server import Server

_log = logging.getLogger("onboard.serve")
Say = Callable[[list[str]], None]
"""Tells a user that the server has started, and the facts of the model."""


def serve_replicas(
    model: str,
    told: ServeSettings,
    door: socket.socket,
    *,
    replicas: int,
    address: str,
    say: Say,
    gpus: int,
    **options: Any,
) -> None:
    """Serve a model by replicas on the Ray cluster at `address` until SIGINT or SIGTERM; SIGHUP
    restarts the replicas one after the other.

    Each has `gpus`, or a core. `options` are those of `LLM`. Raises `OnboardError` where replicas
    do not start, or requests were cut off.
    """
    behind = told.model_copy(update={"api_keys": [], "host": "127.0.0.1"})
    given = {name: _everywhere(value) for name, value in options.items()}
    settings = FleetSettings(replicas, _everywhere(model), behind, given, gpus)
    with fleet(settings, address) as (running, facts):
        say(facts)
        front = create_front(Sender(running), told, _restarting(running))
        Server(front, told).stay(door)


def _everywhere(value: Any) -> Any:
    """Return a folder or a file as every process finds it, whatever folder it works in."""
    if isinstance(value, Path):
        return value.expanduser().resolve()
    if isinstance(value, str) and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    if isinstance(value, Mapping):
        return {key: _everywhere(each) for key, each in value.items()}
    return value


def _restarting(running: RayFleet) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return the life of a front whose replicas SIGHUP restarts."""
    tasks: set[asyncio.Task[None]] = set()

    async def restart() -> None:
        _log.warning("the replicas are restarted, one after the other")
        try:
            await asyncio.to_thread(running.start)
        except OnboardError as error:
            _log.error("%s", error)
        else:
            _log.warning("the replicas have been restarted")

    def wanted() -> None:
        if not tasks:
            task = asyncio.ensure_future(restart())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, wanted)
        yield

    return life

"""Work for a client, as long as the client is there."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import Request

from onboard.serve.refusals import RefusedError


async def while_connected(request: Request, work: Any) -> Any:
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

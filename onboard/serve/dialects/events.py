"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from onboard.serve.refusals import RefusedError, as_refusal

DONE = b"data: [DONE]\n\n"
_log = logging.getLogger("onboard.serve")


def event(document: Any, name: str | None = None) -> bytes:
    """Return one event; what JSON leaves unescaped has no line ends."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%bdata: %b\n\n" % (head, to_json(document))


async def guarded(
    first: bytes, events: AsyncGenerator[bytes, None], failed: Callable[[RefusedError], bytes]
) -> AsyncIterator[bytes]:
    """Yield events; of an error on the way the last one tells, as the status is sent already."""
    async with aclosing(events) as each:
        yield first
        try:
            async for one in each:
                yield one
        except Exception as error:
            yield failed(told(error))


def told(error: Exception) -> RefusedError:
    """Return what the client is told, and log what it is not."""
    refusal = as_refusal(error)
    if refusal.status >= 500:
        _log.error("a request failed", exc_info=error)
    return refusal

"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what any of the streams yields, as it comes.

    A stream is asked for more as soon as the caller comes back, before another one's news are told:
    by that it knows that the caller has done with the last. The first error is raised; then, and
    when the caller leaves, all are closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as alone:
            async for one in alone:
                yield one
        return
    asked = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while asked:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = asked.pop(task)
                try:
                    one = task.result()
                except StopAsyncIteration:
                    continue
                yield one
                asked[asyncio.ensure_future(anext(stream))] = stream
                await asyncio.sleep(0)
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

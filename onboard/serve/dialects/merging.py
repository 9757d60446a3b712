"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what any of the streams yields, as it comes.

    The first error is raised; then, and when the caller leaves, all are closed.
    """
    news: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(maxsize=1)

    async def follow(stream: AsyncGenerator[T, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for each in stream:
                    await news.put((each,))
        except Exception as error:
            end = error
        await news.put(end)

    tasks = [asyncio.create_task(follow(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            one = await news.get()
            if isinstance(one, Exception):
                raise one
            if one is None:
                left -= 1
            else:
                yield one[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

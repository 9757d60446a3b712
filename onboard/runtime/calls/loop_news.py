"""What an engine's thread tells callers in an event loop.

A loop is woken once for all that a step brings, and a caller that comes late gets all that waits
together: so news cost least where there are most of them.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from onboard.runtime.calls.engine_thread import Told
from onboard.runtime.calls.outputs import Delta

News = asyncio.Queue[Told]
"""Of one caller."""


class LoopNews:
    """Brings news into one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._waiting: deque[tuple[News, Told]] = deque()
        self._called = False

    def tell(self, caller: News, told: Told) -> None:
        """Have a caller told at the next `wake`."""
        self._waiting.append((caller, told))

    def wake(self) -> None:
        """Have the loop take what waits; any thread may say so, and does not wait for it."""
        loop = self._loop()
        if self._waiting and not self._called and loop is not None and not loop.is_closed():
            self._called = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # first: what comes from now on calls again
        while self._waiting:
            caller, told = self._waiting.popleft()
            caller.put_nowait(told)


async def all_news(caller: News) -> list[Told]:
    """Return what has been told, once there is something."""
    told = [await caller.get()]
    while not caller.empty():
        told.append(caller.get_nowait())
    return told


def each_delta(told: Iterable[Told]) -> Iterator[Delta]:
    """Yield all deltas; raise the error that comes in their place."""
    for one in told:
        if isinstance(one, BaseException):
            raise one
        yield from one


def together(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Yield one delta for each output, with all that its deltas bring; an error comes behind them."""
    found: dict[int, Delta] = {}
    error: Exception | None = None
    try:
        for delta in deltas:
            before = found.get(delta.index)
            found[delta.index] = delta if before is None else _followed(before, delta)
    except Exception as raised:
        error = raised
    yield from found.values()
    if error is not None:
        raise error


def _followed(one: Delta, other: Delta) -> Delta:
    """Return the delta that brings what two bring one after the other."""
    logprobs = None if one.logprobs is None else [*one.logprobs, *(other.logprobs or ())]
    text, tokens = one.text + other.text, [*one.token_ids, *other.token_ids]
    return replace(other, text=text, token_ids=tokens, logprobs=logprobs)

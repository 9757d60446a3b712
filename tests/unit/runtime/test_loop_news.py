"""News from another thread: nothing lost, an order that stays, few wake-ups."""

from __future__ import annotations

import asyncio
import random
from threading import Thread

import pytest

from onboard.errors import OnboardError
from onboard.runtime.calls.loop_news import LoopNews, News, all_news, each_delta, together
from onboard.runtime.calls.outputs import Delta


def delta(index: int, token: int, ended: bool = False) -> Delta:
    logprobs = [{token: -1.0}] if index else None
    return Delta(index, f" {token}", [token], logprobs, "length" if ended else None)


def test_what_threads_tell_arrives_in_order() -> None:
    """Of several threads to several callers, while these read; each thread's own order stays."""

    async def told() -> list[list[int]]:
        loop = LoopNews(asyncio.get_running_loop())
        callers: list[News] = [asyncio.Queue() for _ in range(3)]

        def tell(first: int) -> None:
            for token in range(first, first + 300):
                loop.tell(callers[token % 3], [delta(0, token)])
                if token % 7 == 6 or token == first + 299:
                    loop.wake()

        async def read(caller: News) -> list[int]:
            found: list[int] = []
            while len(found) < 200:
                found += [each.token_ids[0] for each in each_delta(await all_news(caller))]
            return found

        threads = [Thread(target=tell, args=(first,)) for first in (0, 300)]
        for thread in threads:
            thread.start()
        return list(await asyncio.gather(*map(read, callers)))

    for number, found in enumerate(asyncio.run(told())):
        for first in (0, 300):
            own = [token for token in found if first <= token < first + 300]
            assert own == list(range(first + (number - first) % 3, first + 300, 3))


def test_a_loop_is_woken_once_for_what_comes_before_it_looks() -> None:
    async def woken() -> tuple[int, int]:
        loop, calls = asyncio.get_running_loop(), 0
        own = loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            nonlocal calls
            calls += 1
            return own(*args)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[assignment,method-assign]
        news, caller = LoopNews(loop), asyncio.Queue()  # type: ignore[var-annotated]
        for token in range(64):
            news.tell(caller, [delta(0, token)])
        for _ in range(3):
            news.wake()
        return calls, len(await all_news(caller))

    assert asyncio.run(woken()) == (1, 64)


def test_deltas_that_wait_are_one_for_each_output() -> None:
    tokens = [random.randrange(100) for _ in range(9)]
    given = [delta(0, tokens[0]), delta(1, 7), *(delta(0, token) for token in tokens[1:])]
    first, second = together([*given, delta(1, 8, ended=True)])
    assert (first.token_ids, first.finish_reason, first.logprobs) == (tokens, None, None)
    assert first.text == "".join(f" {token}" for token in tokens)
    assert (second.text, second.finish_reason) == (" 7 8", "length")
    assert second.logprobs == [{7: -1.0}, {8: -1.0}]


def test_an_error_comes_behind_what_came_before_it() -> None:
    news = together(each_delta([[delta(0, 5)], OnboardError("no more")]))
    assert next(news).token_ids == [5]
    with pytest.raises(OnboardError, match="no more"):
        next(news)

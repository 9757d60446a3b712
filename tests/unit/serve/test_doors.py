"""Who may come in, and how much may be brought: keys, pages of other sites, bodies without end."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from onboard.errors import UsageError
from onboard.serve.doors import Bodies, Door
from onboard.serve.refusals import RefusedError
from onboard.serve.serve_settings import ServeSettings


async def _inside(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def status(headers: dict[str, str], path: str = "/v1/completions", **settings: Any) -> int:
    return answer(headers, path, **settings).status_code


def answer(headers: dict[str, str], path: str, **settings: Any) -> httpx.Response:
    door = Door(_inside, ServeSettings(names=["tiny"], **settings))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(door)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as one:
            return await one.post(path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://127.0.0.1.evil.example",
        "http://127.0.0.1:1",
        "null",
        "http://[",
    ],
)
def test_pages_of_other_sites_may_not_ask(origin: str) -> None:
    assert status({"Origin": origin}) == 403
    assert status({"Origin": origin}, "/metrics") == 403
    assert status({"Origin": origin, "x-api-key": "k"}, api_keys=["k"]) == 200, "it knows the key"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://127.0.0.1:8000"},
        {"Host": "localhost:8000", "Origin": "http://localhost:8000"},
        {"Host": "[::1]:8000"},
        {"Origin": "vscode-webview://editor"},
    ],
)
def test_programs_and_the_own_page_may(headers: dict[str, str]) -> None:
    assert status(headers) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "["]
)
def test_names_that_lead_here_are_not_this_server(host: str) -> None:
    """DNS rebinding: a page's own name becomes a loopback address."""
    assert status({"Host": host}) == 403
    assert status({"Host": host, "Origin": f"http://{host}"}) == 403
    assert status({"Host": host}, host="0.0.0.0") == 200
    assert status({"Host": host, "x-api-key": "k"}, api_keys=["k"]) == 200


def test_keys_in_both_ways_and_refusals_in_both_forms() -> None:
    for shown in ({"Authorization": "Bearer sesame"}, {"x-api-key": "sesame"}):
        assert status(shown, api_keys=["sesame"]) == 200
    for wrong in ({}, {"x-api-key": "Sesame"}, {"Authorization": "sesame2"}, {"x-api-key": ""}):
        assert status(wrong, api_keys=["sesame"]) == 401
        assert status(wrong, "/health", api_keys=["sesame"]) == 200
    openais = answer({}, "/v1/completions", api_keys=["sesame"]).json()
    assert openais["error"]["type"] == "authentication_error"
    assert set(openais["error"]) == {"message", "type", "param", "code"}
    anthropics = answer({}, "/v1/messages", api_keys=["sesame"]).json()
    assert anthropics["type"] == "error"
    assert anthropics["error"]["type"] == "authentication_error"


def test_each_of_several_keys_opens_and_no_other() -> None:
    keys = ["sesame", "open", "öffne"]
    for shown, expected in (("sesame", 200), ("open", 200), ("sesameopen", 401), ("", 401)):
        assert status({"x-api-key": shown}, api_keys=keys) == expected
    with pytest.raises(UsageError, match="at least 1 character"):
        ServeSettings(names=["tiny"], api_keys=["sesame", ""])


class Line:
    """A request whose body comes when the test says so."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.taken = asyncio.Event()
        """Set when the server waits for what the test has not sent yet."""
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        if self._news.empty():
            self.taken.set()
        return await self._news.get()

    def send(self, body: bytes, *, more: bool = False) -> None:
        self._news.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self._news.put_nowait({"type": "http.disconnect"})


@pytest.fixture
def bodies() -> Bodies:
    limits: dict[str, Any] = {"max_body_bytes": 2000, "max_bodies_bytes": 3000}
    return Bodies(ServeSettings(names=["tiny"], **limits))


async def _refused(bodies: Bodies, line: Line, status: int) -> None:
    with pytest.raises(RefusedError) as refused:
        await bodies.read(line.request)
    assert refused.value.status == status


def test_bodies_that_are_too_long_alone_or_together(bodies: Bodies) -> None:
    async def main() -> None:
        first, second, third = Line(), Line(), Line()
        first.send(b"a" * 1500, more=True)
        waiting = asyncio.ensure_future(bodies.read(first.request))
        await first.taken.wait()
        second.send(b"b" * 1501, more=True)
        await _refused(bodies, second, 429)
        third.send(b"c" * 2001, more=True)
        await _refused(bodies, third, 413)
        first.send(b"a" * 500)
        assert await waiting == b"a" * 2000
        again = Line()
        again.send(b"d" * 2000)
        assert await bodies.read(again.request) == b"d" * 2000, "the others have made room"

    asyncio.run(main())


def test_bodies_that_do_not_come_or_break_off() -> None:
    async def main() -> None:
        limits: dict[str, Any] = {"max_bodies_bytes": 1024, "body_seconds": 0.01}
        bodies = Bodies(ServeSettings(names=["tiny"], **limits))
        slow, gone, well = Line(), Line(), Line()
        slow.send(b"a" * 1000, more=True)
        await _refused(bodies, slow, 408)
        gone.send(b"a" * 1000, more=True)
        gone.leave()
        await _refused(bodies, gone, 499)
        well.send(b"b" * 1024)
        assert await bodies.read(well.request) == b"b" * 1024, "nothing of theirs is held"

    asyncio.run(main())

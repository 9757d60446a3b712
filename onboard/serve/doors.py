"""What a request passes before it is read: who may come in, and how much may be brought."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from onboard.serve.refusals import RefusedError
from onboard.serve.serve_settings import ServeSettings

_OPEN = ("/health", "/version", "/metrics", "/")
"""Paths that need no key."""
_WEB = ("http", "https")
MESSAGES = "/v1/messages"
"""Where errors are told in Anthropic's words."""


def refusal_response(refusal: RefusedError, path: str = "") -> Response:
    """Return what a client gets, in the form of the interface that has the path."""
    anthropics = path.startswith(MESSAGES)
    body = refusal.body_of_messages() if anthropics else refusal.body()
    headers = {"Retry-After": "1"} if refusal.status == 429 else None
    return JSONResponse(body, refusal.status, headers)


class Door:
    """Lets in who shows a key, as OpenAI's or as Anthropic's clients do.

    Without a key it keeps out the pages of other sites that a browser on this machine has open:
    they may neither have the browser ask (`Origin`) nor pass themselves off as this server by a
    name of theirs that leads to a loopback address (DNS rebinding: `Host`).
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or 403 in the application's place for who may not come in."""
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refusal_response(refusal, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RefusedError | None:
        headers = dict(scope["headers"])
        if keys := self._settings.api_keys:
            if scope["path"] in _OPEN or _shows(headers, keys):
                return None
            return RefusedError("the API key is wrong, or missing", status=401)
        host, origin = _text(headers.get(b"host", b"")), _text(headers.get(b"origin", b""))
        if _is_foreign(origin, host):
            return RefusedError("pages of other sites may not ask here", status=403)
        if is_loopback(self._settings.host) and host and not is_loopback(_name(host)):
            return RefusedError(
                f"it is served to this machine, not as {host!r:.100}: give it an API key"
                " if others may come",
                status=403,
            )
        return None


def _shows(headers: Mapping[bytes, bytes], keys: Sequence[str]) -> bool:
    """Whether one of the keys is shown; all are compared, so that time does not tell which."""
    bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
    shown = bearer or headers.get(b"x-api-key", b"")
    return any([secrets.compare_digest(shown, key.encode()) for key in keys])


def _text(header: bytes) -> str:
    return header.decode("latin-1").strip().lower()


def _is_foreign(origin: str, host: str) -> bool:
    """Return whether a page asks that did not come from this server."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return True
    return origin == "null" or (parts.scheme in _WEB and parts.netloc != host)


def _name(host: str) -> str:
    """Return a host without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine's own alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Bodies:
    """Reads bodies within limits of size and time, and all together of memory."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._held = 0
        """Bytes of bodies that have not come to their end."""

    async def read(self, request: Request) -> bytes:
        """Return a request's body; raise `RefusedError` for one that exceeds a limit, before the
        rest is read.
        """
        seconds = self._settings.body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._read(request)
        except TimeoutError:
            message = f"the body has not come within {seconds:g} seconds"
            raise RefusedError(message, status=408) from None
        except ClientDisconnect:
            raise RefusedError("the client went away", status=499) from None

    async def _read(self, request: Request) -> bytes:
        most, parts, size = self._settings.max_body_bytes, [], 0
        try:
            async for part in request.stream():
                size += len(part)
                self._held += len(part)
                if size > most:
                    raise RefusedError(f"the body has more than {most:,} bytes", status=413)
                if self._held > self._settings.max_bodies_bytes:
                    raise RefusedError("too many bodies are on their way; come again", status=429)
                parts.append(part)
            return b"".join(parts)
        finally:
            self._held -= size

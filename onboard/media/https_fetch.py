"""Files by https, from hosts that are allowed alone.

A name is resolved once, all its addresses have to be public, and the connection goes to one of
them: a name that means another address later (DNS rebinding) leads nowhere. Proxies of the
environment are not asked, because they would resolve the name themselves.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Thread, Timer
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from onboard.errors import UsageError

_PORT = 443
_PART = 1 << 16
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for IPv4 ones (RFC 6052)."""


def fetch(url: str, allowed: Collection[str], *, most: int, seconds: float) -> bytes:
    """Return what lies at a URL, at most `most` bytes, in at most `seconds`.

    A redirect is followed on the same host only. Raises `UsageError` for a host that is not
    allowed or has an address that is not public, and for what is too large, too slow or not there.
    """
    end = time.monotonic() + seconds
    for _ in range(_MOST_REDIRECTS + 1):
        parts = _checked(url, allowed)
        address = _public_address(str(parts.hostname), end - time.monotonic())
        status, found = _get(parts, address, most, end)
        if status == 200:
            return found
        url = _redirected(url, parts, found.decode("latin-1"))
    raise UsageError(f"{parts.hostname} redirects more than {_MOST_REDIRECTS} times")


def _checked(url: str, allowed: Collection[str]) -> SplitResult:
    """Return the parts of a URL of an allowed host."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{url!r:.100} is no URL: {error}") from None
    if not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"{url!r:.100} is no URL", hint="Write other characters as %XX")
    if parts.scheme != "https" or not host or parts.username is not None:
        raise UsageError(f"{url!r:.100} is not taken", hint="Give https://HOST/..., without a user")
    if port not in (None, _PORT):
        raise UsageError(f"port {port} is not taken", hint=f"https has port {_PORT}")
    if host not in {name.lower() for name in allowed}:
        raise UsageError(
            f"{host!r:.100} is no host that images and sound are fetched from",
            hint="Allow it with allowed_media_domains, or send a data: URL",
        )
    return parts


def _public_address(host: str, seconds: float) -> str:
    """Return an address of a host, all of whose addresses are public."""
    addresses = _resolved(host, seconds)
    for address in addresses:
        if not is_public(address):
            raise UsageError(f"{host} has the address {address}, which is not public")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is one of the open network, also where it stands for another one."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        if found in _TRANSLATED:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if (inner := found.ipv4_mapped or found.sixtofour) is not None:
            return is_public(str(inner))
        if found.teredo is not None or found.is_site_local:
            return False
    return found.is_global and not found.is_multicast


def _resolved(host: str, seconds: float) -> list[str]:
    """Return a host's addresses; the system's resolver cannot be interrupted, so it is left."""
    found: list[str] = []

    def resolve() -> None:
        entries = socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)
        found.extend(str(entry[4][0]).partition("%")[0] for entry in entries)

    thread = Thread(target=_quietly, args=(resolve,), daemon=True)
    thread.start()
    thread.join(max(seconds, 0))
    if not found:
        raise UsageError(f"{host} has no address that can be found")
    return found


def _quietly(work: Any) -> None:
    try:
        work()
    except (OSError, UnicodeError):
        return


class _Connection(http.client.HTTPSConnection):
    """A connection to an address that was checked, for a host whose certificate is asked for."""

    def __init__(self, host: str, address: str, seconds: float) -> None:
        self.secure = _context()
        super().__init__(host, _PORT, timeout=seconds, context=self.secure)
        self._address = address
        self.opened: socket.socket | None = None
        """The socket, also when only an answer has it."""

    def connect(self) -> None:
        """Connect to the address, not to what the name means now."""
        plain = socket.create_connection((self._address, _PORT), self.timeout)
        self.sock = self.opened = self.secure.wrap_socket(plain, server_hostname=self.host)


def _context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _get(parts: SplitResult, address: str, most: int, end: float) -> tuple[int, bytes]:
    """Return 200 and the content, or another status and the place to go to."""
    host = str(parts.hostname)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Accept-Encoding": "identity", "User-Agent": "onboard"}
    connection = _Connection(host, address, max(end - time.monotonic(), 0.001))
    try:
        with _ended_at(connection, end):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            if answer.status in _REDIRECTS:
                return answer.status, answer.getheader("Location", "").encode("latin-1")
            _check_answer(host, answer, most)
            content = b"".join(_content(host, answer, most))
            if time.monotonic() < end:
                return 200, content
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() >= end:
            raise UsageError(f"{host} takes too long to send what is asked for") from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UsageError(f"{host} does not send what is asked for ({reason})") from None
    finally:
        connection.close()


@contextmanager
def _ended_at(connection: _Connection, end: float) -> Iterator[None]:
    """End a connection at a time, however slowly it goes on: a timeout of a socket begins anew
    with each byte.
    """

    def cut() -> None:
        if (sock := connection.opened) is not None:
            # Of the socket below: an encrypted one would go on in plain text.
            _quietly(lambda: socket.socket.shutdown(sock, socket.SHUT_RDWR))

    alarm = Timer(max(end - time.monotonic(), 0), cut)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def _check_answer(host: str, answer: http.client.HTTPResponse, most: int) -> None:
    if answer.status != 200:
        raise UsageError(f"{host} answers with status {answer.status}")
    if answer.getheader("Content-Encoding", "identity") != "identity":
        raise UsageError(f"{host} sends it compressed, which was not asked for")
    if answer.length is not None and answer.length > most:
        raise _too_large(host, most)


def _content(host: str, answer: http.client.HTTPResponse, most: int) -> Iterator[bytes]:
    size = 0
    while part := answer.read1(_PART):
        size += len(part)
        if size > most:
            raise _too_large(host, most)
        yield part
    if answer.length:
        raise UsageError(f"{host} sends only {size:,} bytes of it")


def _too_large(host: str, most: int) -> UsageError:
    return UsageError(f"{host} sends more than {most:,} bytes", hint="Give a smaller file")


def _redirected(url: str, parts: SplitResult, place: str) -> str:
    """Return where a redirect leads; to another host none does."""
    target = urljoin(url, place)
    try:
        host = urlsplit(target).hostname
    except ValueError:
        host = None
    if not place or host != parts.hostname:
        raise UsageError(
            f"{parts.hostname} redirects to {host!r:.100}", hint="Give that URL itself"
        )
    return target

"""What is fetched comes from a host that is allowed, at an address that was looked at, in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from onboard.errors import UsageError
from onboard.media.https_fetch import fetch, is_public
from tests.support.https_server import ADDRESS, HOST, Network, content, network, redirect

URL = f"https://{HOST}"


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with network(tmp_path, monkeypatch) as found:
        yield found


def got(path: str, *, most: int = 1000, seconds: float = 10.0) -> bytes:
    return fetch(f"{URL}{path}", [HOST.upper()], most=most, seconds=seconds)


def test_what_lies_there_is_fetched_from_the_address_that_was_looked_at(net: Network) -> None:
    net.answers["/a?size=2"] = content(b"x" * 1000)
    net.names[HOST] = [[ADDRESS], ["127.0.0.1"]]  # what a name means a second time
    assert got("/a?size=2") == b"x" * 1000
    assert net.asked == [HOST]
    assert net.connected == [ADDRESS]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.9", "169.254.169.254", "0.0.0.0", "100.64.0.1", "::1",
     "fe80::1", "fd00::1", "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::a00:1", "224.0.0.1",
     "::", "ff02::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "fec0::1"],
)  # fmt: skip
def test_an_address_that_is_not_public_is_refused(net: Network, address: str) -> None:
    assert not is_public(address)
    net.answers["/a"] = content(b"x")
    net.names[HOST] = [[ADDRESS, address]]
    with pytest.raises(UsageError, match="which is not public"):
        got("/a")
    assert not net.connected


def test_public_addresses_are_known() -> None:
    for address in (ADDRESS, "8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"):
        assert is_public(address)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"http://{HOST}/a", "is not taken"),
        (f"https://user:word@{HOST}/a", "without a user"),
        (f"https://{HOST}@other.example/a", "without a user"),
        (f"https://{HOST}:8443/a", "port 8443"),
        (f"https://{HOST}:99999/a", "is no URL"),
        ("https://other.example/a", "no host that"),
        (f"https://{HOST}.other.example/a", "no host that"),
        (f"https://{HOST}/a b", "is no URL"),
        (f"https://{HOST}/\r\nHost: x", "is no URL"),
        ("https:///a", "is not taken"),
        ("https://[::1/a", "is no URL"),
        ("https://127.0.0.1/a", "no host that"),
    ],
)
def test_urls_of_other_places_are_refused(net: Network, url: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        fetch(url, [HOST], most=10, seconds=5)
    assert not net.asked
    assert not net.connected


def test_an_address_is_looked_at_even_where_it_is_allowed(net: Network) -> None:
    net.names["127.0.0.1"] = [["127.0.0.1"]]
    with pytest.raises(UsageError, match="not public"):
        fetch("https://127.0.0.1/a", ["127.0.0.1"], most=10, seconds=5)


def test_a_redirect_leads_to_the_same_host_alone(net: Network) -> None:
    net.answers |= {"/a": redirect("/b"), "/b": redirect(f"{URL}/c", 308), "/c": content(b"here")}
    assert got("/a") == b"here"
    assert net.connected == [ADDRESS] * 3
    net.answers["/a"] = redirect("https://127.0.0.1/b")
    with pytest.raises(UsageError, match=r"redirects to '127\.0\.0\.1'"):
        got("/a")
    net.answers["/a"] = redirect(f"http://{HOST}/c")
    with pytest.raises(UsageError, match="is not taken"):
        got("/a")
    net.answers["/a"] = redirect("/a")
    with pytest.raises(UsageError, match="redirects more than 3 times"):
        got("/a")
    net.answers["/a"] = redirect("")
    with pytest.raises(UsageError, match="redirects to"):
        got("/a")


def test_a_name_that_means_another_address_after_a_redirect_is_refused(net: Network) -> None:
    net.answers |= {"/a": redirect("/b"), "/b": content(b"here")}
    net.names[HOST] = [[ADDRESS], ["10.0.0.1"]]
    with pytest.raises(UsageError, match=r"10\.0\.0\.1, which is not public"):
        got("/a")
    assert net.connected == [ADDRESS]


def test_what_is_too_large_is_not_read(net: Network) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):
            while True:
                handler.wfile.write(b"x" * 4096)

    net.answers |= {"/said": content(b"", Content_Length="1001"), "/endless": endless}
    for path in net.answers:
        with pytest.raises(UsageError, match="sends more than 1,000 bytes"):
            got(path)


def test_what_is_slow_has_an_end(net: Network) -> None:
    def drip(handler: BaseHTTPRequestHandler, start: bytes) -> None:
        with suppress(OSError):
            handler.wfile.write(start)
            while True:  # until the other side goes
                handler.wfile.write(b"x")
                time.sleep(0.02)

    net.answers["/head"] = lambda handler: drip(handler, b"HTTP/1.1 200 OK\r\nX: ")
    net.answers["/body"] = lambda handler: drip(handler, b"HTTP/1.1 200 OK\r\n\r\n")
    net.answers["/never"] = lambda _: time.sleep(2)
    for path in net.answers:
        with pytest.raises(UsageError, match="takes too long"):
            got(path, seconds=0.3)


def test_other_answers_are_one_line(net: Network) -> None:
    net.answers["/short"] = content(b"x" * 10, Content_Length="20")
    net.answers["/packed"] = content(b"x", Content_Encoding="gzip")
    net.answers["/none"] = lambda handler: handler.send_error(404)
    net.answers["/odd"] = lambda handler: None if handler.wfile.write(b"what?\r\n\r\n") else None
    reasons = {"/short": "only 10 bytes", "/packed": "compressed", "/none": "status 404"}
    for path in net.answers:
        with pytest.raises(UsageError, match=reasons.get(path, "does not send")) as refused:
            got(path)
        assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="has no address"):
        fetch("https://nowhere.example/", ["nowhere.example"], most=1, seconds=5)


def test_a_certificate_of_another_host_is_refused(net: Network) -> None:
    net.names["other.example"] = [[ADDRESS]]
    net.answers["/a"] = content(b"x")
    with pytest.raises(UsageError, match="SSLCertVerificationError"):
        fetch("https://other.example/a", ["other.example"], most=10, seconds=5)

"""A host of the network, played by a server of this machine, with a certificate of its own."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOST, ADDRESS = "pictures.example", "93.184.215.14"
Answer = Callable[[BaseHTTPRequestHandler], None]


def certificate(folder: Path, host: str) -> Path:
    """Write a key and a certificate for a host into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{host}.pem"
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    text = key.private_bytes(serialization.Encoding.PEM, form, plain)
    path.write_bytes(text + made.public_bytes(serialization.Encoding.PEM))
    return path


class Network:
    """What the names of a network mean, and who answers at its addresses."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: dict[str, Answer] = {}
        """By path."""
        self.names = {HOST: [[ADDRESS]]}
        """What a name means when it is asked for once, twice, ..."""
        self.asked: list[str] = []
        self.connected: list[str] = []
        self._connect = socket.create_connection

    def getaddrinfo(self, host: str, port: Any, **_: Any) -> list[Any]:
        self.asked.append(host)
        if host not in self.names:
            raise socket.gaierror("unknown")
        meanings = self.names[host]
        found = meanings[min(self.asked.count(host), len(meanings)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    def create_connection(self, address: tuple[str, int], timeout: Any = None) -> socket.socket:
        self.connected.append(address[0])
        found = socket.socket()
        found.settimeout(timeout)
        found.connect(("127.0.0.1", self.port))
        return found


@contextmanager
def network(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Play the host, for `onboard.media.https_fetch` alone."""
    from onboard.media import https_fetch

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answers[self.path](self)

        def log_message(self, *_: Any) -> None:
            return

    pem = certificate(folder, HOST)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    served = Network(server.server_address[1])
    trusted = ssl.create_default_context(cafile=str(pem))
    patch.setattr(https_fetch, "_context", lambda: trusted)

    class Played:
        """The module `socket`, whose network is ours."""

        getaddrinfo, create_connection = served.getaddrinfo, served.create_connection

        def __getattr__(self, name: str) -> Any:
            return getattr(socket, name)

    patch.setattr(https_fetch, "socket", Played())
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def content(data: bytes, **headers: str) -> Answer:
    """Answer with data, and with its length unless another is said."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def redirect(place: str, status: int = 302) -> Answer:
    """Answer that it is elsewhere."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Location", place)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer

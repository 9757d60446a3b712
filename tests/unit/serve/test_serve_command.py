"""The command: it says where it serves, answers, and lets what runs end after SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.runtime.paused import SECONDS, wait_until
from tests.support.serving import speaking_model


def _lets_in(where: tuple[str, int]) -> bool:
    try:
        socket.create_connection(where, timeout=SECONDS).close()
    except ConnectionRefusedError:
        return False
    return True


def _ask(where: tuple[str, int], path: str, body: dict[str, object]) -> socket.socket:
    """Ask by a connection that takes little before it is read: a long answer waits in the server."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(SECONDS)
    connection.connect(where)
    content = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(f"{head}{content}".encode())
    return connection


def test_the_command_serves_and_drains(tmp_path: Path) -> None:
    """The door is closed behind a client whose answer has only begun, and it gets the rest."""
    model = speaking_model(tmp_path)
    command = [sys.executable, "-m", "onboard", "serve", str(model.checkpoint), "--root"]
    command += [str(model.root), "--device", "cpu", "--port", "0", "--name", "tiny"]
    command += ["--drain-seconds", str(int(SECONDS))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:")
        address = urlsplit(line.split()[3].rstrip(","))
        assert address.hostname
        assert address.port
        where = (address.hostname, address.port)
        # Scores make it some 5 MB, more than the system keeps for a connection.
        body = {"prompt": "the cat", "max_tokens": 900, "ignore_eos": True, "stream": True}
        body |= {"n": 3, "logprobs": 100}
        with _ask(where, f"{address.path}/completions", body) as connection:
            found = connection.recv(16)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not _lets_in(where))
            while part := connection.recv(1 << 16):
                found += part
        assert found.startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]\n\n" in found[-64:], "it was cut off"
        assert process.wait(SECONDS) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()

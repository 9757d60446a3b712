"""The command: it says where it serves, answers, and lets what runs end after SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from onboard.cli.main import run
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


@contextmanager
def _command(tmp_path: Path, drain_seconds: float) -> Iterator[tuple[Any, tuple[str, int], str]]:
    """Start the command; yield its process, where it listens, and the path of its interface."""
    model = speaking_model(tmp_path)
    command = [sys.executable, "-m", "onboard", "serve", str(model.checkpoint), "--root"]
    command += [str(model.root), "--device", "cpu", "--port", "0", "--name", "tiny"]
    command += ["--drain-seconds", str(int(drain_seconds))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:")
        address = urlsplit(line.split()[3].rstrip(","))
        assert address.hostname
        assert address.port
        yield process, (address.hostname, address.port), address.path
    finally:
        process.kill()
        process.communicate()


# Scores make it some 5 MB, more than the system keeps for a connection.
LONG = {"prompt": "the cat", "max_tokens": 900, "ignore_eos": True, "stream": True}
LONG |= {"n": 3, "logprobs": 100}


def test_the_command_serves_and_drains(tmp_path: Path) -> None:
    """The door is closed behind a client whose answer has only begun, and it gets the rest."""
    with _command(tmp_path, SECONDS) as (process, where, path):
        with _ask(where, f"{path}/completions", LONG) as connection:
            found = connection.recv(16)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not _lets_in(where))
            while part := connection.recv(1 << 16):
                found += part
        assert found.startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]\n\n" in found[-64:], "it was cut off"
        assert process.wait(SECONDS) == 0


def test_a_request_that_is_cut_off_is_told_and_no_orderly_end(tmp_path: Path) -> None:
    with (
        _command(tmp_path, 1) as (process, where, path),
        _ask(where, f"{path}/completions", LONG) as connection,
    ):
        connection.recv(16)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 1
        last = process.stderr.read().splitlines()[-1]
        assert last.startswith("onboard: requests that were cut off after 1 seconds: 1. ")


def test_replicas_need_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = speaking_model(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["serve", str(model.checkpoint), "--root", str(model.root), "--port", "0"]
    assert run([*words, "--device", "cpu", "--replicas", "2"], debug=False) == 2
    assert capsys.readouterr().err.endswith("Ray, which is missing. pip install 'onboard[ray]'\n")

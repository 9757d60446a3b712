"""The command: it says where it serves, answers, and lets what runs end after SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import urlsplit

import pytest
import torch
from transformers import AutoTokenizer

from onboard.cli.main import run
from tests.support.runtime.paused import SECONDS, wait_until
from tests.support.runtime.tiny import Tiny
from tests.support.serving import speaking_model
from tests.support.warm import Forked, Warm


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


class Serving(NamedTuple):
    """A command that serves: its process, where it listens, the path of its interface."""

    process: Forked
    where: tuple[str, int]
    path: str
    printed: IO[str]
    errors: IO[str]

    def ended(self) -> int:
        """Return its exit code; it ends soon."""
        state = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: not state.exists() or ") Z " in state.read_text())
        return self.process.wait()


Command = Callable[..., AbstractContextManager[Serving]]


@pytest.fixture
def command(warm: Warm, tmp_path: Path) -> Command:
    """Start the command in a process that has its imports done."""

    @contextmanager
    def start(model: Tiny, drain_seconds: float, *more: str) -> Iterator[Serving]:
        words = ["serve", str(model.checkpoint), "--root", str(model.root), "--device", "cpu"]
        words += ["--port", "0", "--name", "tiny", "--drain-seconds", str(int(drain_seconds))]
        with (
            (tmp_path / "errors").open("w+") as errors,
            warm.started("onboard", *words, *more, errors=errors) as (process, printed),
        ):
            try:
                line = printed.readline()
                assert line.startswith("serving tiny at http://127.0.0.1:")
                address = urlsplit(line.split()[3].rstrip(","))
                assert address.hostname
                assert address.port
                where = address.hostname, address.port
                yield Serving(process, where, address.path, printed, errors)
            finally:
                os.kill(process.pid, signal.SIGKILL)

    return start


# Scores make it some 5 MB, more than the system keeps for a connection.
LONG = {"prompt": "the cat", "max_tokens": 900, "ignore_eos": True, "stream": True}
LONG |= {"n": 3, "logprobs": 100}


def test_the_command_serves_and_drains(tmp_path: Path, command: Command) -> None:
    """The door is closed behind a client whose answer has only begun, and it gets the rest."""
    with command(speaking_model(tmp_path), SECONDS) as serving:
        with _ask(serving.where, f"{serving.path}/completions", LONG) as connection:
            found = connection.recv(16)
            os.kill(serving.process.pid, signal.SIGTERM)
            wait_until(lambda: not _lets_in(serving.where))
            while part := connection.recv(1 << 16):
                found += part
        assert found.startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]\n\n" in found[-64:], "it was cut off"
        assert serving.ended() == 0


def test_a_request_that_is_cut_off_is_told_and_no_orderly_end(
    tmp_path: Path, command: Command
) -> None:
    """What it asked is not in what the server says."""
    with (
        command(speaking_model(tmp_path), 1) as serving,
        _ask(serving.where, f"{serving.path}/completions", LONG) as connection,
    ):
        connection.recv(16)
        os.kill(serving.process.pid, signal.SIGTERM)
        assert serving.ended() == 1
        serving.errors.seek(0)
        log = serving.errors.read()
        last = log.splitlines()[-1]
        assert last.startswith("onboard: requests that were cut off after 1 seconds: 1. ")
        assert str(LONG["prompt"]) not in serving.printed.read() + log
        assert "Traceback" not in log


def test_two_ranks_serve_and_leave_nothing(tmp_path: Path, command: Command) -> None:
    """The likeliest tokens have the log-probabilities that transformers gives them."""
    model = speaking_model(tmp_path)
    body = {"prompt": "the cat", "max_tokens": 1, "temperature": 0, "logprobs": 5}
    with command(model, SECONDS, "--world-size", "2", "--dtype", "float32") as serving:
        ranks = _children(serving.process.pid)
        with _ask(serving.where, f"{serving.path}/completions", body) as connection:
            answer = b""
            while b'"usage"' not in answer and (part := connection.recv(1 << 16)):
                answer += part
        os.kill(serving.process.pid, signal.SIGTERM)
        assert serving.ended() == 0
        wait_until(lambda: not any(Path(f"/proc/{rank}/stat").exists() for rank in ranks))
    assert ranks, "no process follows the first"
    found = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["logprobs"]
    tokens = AutoTokenizer.from_pretrained(model.checkpoint)("the cat", return_tensors="pt")
    with torch.no_grad():
        logits = model.hf.float()(tokens["input_ids"]).logits[0, -1]
    expected = logits.log_softmax(dim=-1).topk(5).values
    assert found["token_logprobs"] == pytest.approx([float(expected[0])], abs=1e-4)
    for value in found["top_logprobs"][0].values():  # tokens with one text are one there
        assert (expected - value).abs().min() < 1e-4


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for path in found for each in path.read_text().split()]


def test_replicas_need_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = speaking_model(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["serve", str(model.checkpoint), "--root", str(model.root), "--port", "0"]
    assert run([*words, "--device", "cpu", "--replicas", "2"], debug=False) == 2
    assert capsys.readouterr().err.endswith("Ray, which is missing. pip install 'onboard[ray]'\n")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--port", "99999999", "port is 99999999: Input should be less than or equal to 65535"),
        ("--max-running", "0", "max_running is 0: Input should be greater than or equal to 1"),
        (
            "--drain-seconds",
            "-1",
            "drain_seconds is -1.0: Input should be greater than or equal to 0",
        ),
        ("--api-key", "", "api_keys.0 is '': String should have at least 1 character"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_read(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "no/such-model", option, value], debug=False) == 2
    assert capsys.readouterr().err == f"onboard: {said}\n"

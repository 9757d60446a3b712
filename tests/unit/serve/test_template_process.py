"""The process in which chat templates run: it is there with the server and no longer, and survives
clients that go away.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from onboard.serve.service import Service
from tests.support.runtime.paused import SECONDS, wait_until
from tests.support.runtime.tiny import Tiny
from tests.support.serving import TEMPLATE, served, speaking_model

HOSTILE = (
    "{% if take %}{{ 'x' * take }}{% endif %}{% if no %}{{ raise_exception('no') }}{% endif %}"
)
HOLD = """
import sys
from pathlib import Path
from onboard.serve.answers.template_process import TemplateProcess
if __name__ == "__main__":
    process = TemplateProcess(Path(sys.argv[1]))
    print(process.pid, process.write(([{"role": "user", "content": "hi"}], None, {})), flush=True)
    sys.stdin.read()
"""
Server = tuple[str, Service]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return speaking_model(tmp_path_factory.mktemp("served"), TEMPLATE + HOSTILE)


@pytest.fixture(scope="module")
def server(model: Tiny) -> Iterator[Server]:
    with served(model) as found:
        yield found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def body(content: str = "the cat", **options: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return {**said, "temperature": 0, "chat_template_kwargs": options}


def ask(server: Server, **options: Any) -> httpx.Response:
    return httpx.post(f"{server[0]}/v1/chat/completions", json=body(**options), timeout=SECONDS)


def watched(call: Callable[..., Any], inside: list[object]) -> Callable[..., Any]:
    """Keep account of who is inside an asynchronous call."""

    async def watch(*given: Any) -> Any:
        inside.append(given)
        try:
            return await call(*given)
        finally:
            inside.remove(given)

    return watch


def leaving(server: Server, path: str, given: Any) -> socket.socket:
    """Send a request; whoever closes the connection has left."""
    parts, content = urlsplit(server[0]), json.dumps(given).encode()
    connection = socket.create_connection((parts.hostname, parts.port), timeout=SECONDS)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_it_starts_with_the_server_and_ends_with_it(model: Tiny) -> None:
    with served(model) as server:
        wait_until(lambda: server[1].chat_texts.pid)
        pid = server[1].chat_texts.pid
        assert ask(server).status_code == 200
        assert server[1].chat_texts.pid == pid
        assert pid is not None
        assert is_alive(pid)
    assert not is_alive(pid)


def test_without_a_template_there_is_none(tmp_path: Path) -> None:
    with served(speaking_model(tmp_path, template=None)) as server:
        answer = ask(server)
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
        assert server[1].chat_texts.pid is None


def test_it_ends_with_a_server_that_is_killed(model: Tiny, tmp_path: Path) -> None:
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    command = [sys.executable, str(script), str(model.checkpoint)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes) as holder:
        assert holder.stdout is not None
        said = holder.stdout.readline()
        pid = int(said.split()[0])
        assert "<user>hi" in said
        assert is_alive(pid)
        os.kill(pid, signal.SIGSTOP)  # however busy it is
        holder.kill()
        holder.wait()
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not is_alive(pid))


def test_a_client_that_leaves_frees_its_request_and_ends_no_process(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the template is written, and while another one waits for its turn."""
    address, service = server
    ask(server)
    pid, inside = service.chat_texts.pid, []
    assert pid is not None
    monkeypatch.setattr(service, "chat_prompt", watched(service.chat_prompt, inside))
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
        os.kill(pid, signal.SIGSTOP)
        try:
            connections = [leaving(server, path, body()) for _ in range(3)]
            wait_until(lambda: len(inside) == 3)
            for connection in connections:
                connection.close()
            wait_until(lambda: not inside)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert ask(server).status_code == 200
    assert service.chat_texts.pid == pid
    assert httpx.get(f"{address}/health").status_code == 200


def test_a_client_that_leaves_while_its_text_becomes_tokens(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, service = server
    inside: list[object] = []
    for name in ("tokenize", "tokenize_plain", "_read_all"):
        monkeypatch.setattr(service.llm, name, watched(getattr(service.llm, name), inside))
    asked = {"/tokenize": {"prompt": "the cat"}, "/v1/chat/completions": body()}
    asked["/v1/completions"] = {"prompt": "the cat", "max_tokens": 2}
    with service.llm._tokenizing:
        connections = [leaving(server, path, given) for path, given in asked.items()]
        wait_until(lambda: len(inside) == 3)
        for connection in connections:
            connection.close()
        wait_until(lambda: not inside)
    assert ask(server).status_code == 200
    assert not service.llm.thread.running


def test_who_waits_behind_a_process_that_breaks_is_served_by_the_next(server: Server) -> None:
    ask(server)
    service = server[1]
    pid = service.chat_texts.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ask, server)
        wait_until(service.chat_texts._turn.locked)
        later = [pool.submit(ask, server) for _ in range(2)]
        os.kill(pid, signal.SIGKILL)
        assert [each.result().status_code for each in later] == [200, 200]
    assert first.result().status_code == 400
    assert "does not come to an end" in first.result().json()["error"]["message"]
    assert service.chat_texts.pid != pid


def test_what_a_client_makes_the_template_fail_with_is_its_own(server: Server) -> None:
    ask(server)
    pid = server[1].chat_texts.pid
    for options in ({"take": 10**11}, {"take": 2_000_000}, {"no": True}):
        answer = ask(server, **options)
        assert answer.status_code == 400
        assert "template" in answer.json()["error"]["message"]
    assert ask(server).status_code == 200
    assert server[1].chat_texts.pid == pid

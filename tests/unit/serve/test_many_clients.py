"""Many clients at once, some of them broken, cut off or slow: each that is well has the right answer.

The right answer is that of the engine alone. None is lost, and nothing is left behind.
"""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from onboard import LLM, SamplingParams
from onboard.serve.service import Service
from tests.support.runtime.paused import SECONDS, wait_until
from tests.support.runtime.tiny import Tiny
from tests.support.serving import DEMO, Onboarded, served, speaking_model

TEXTS = ("the cat", "the dog sat", "on the mat", "yes", "the cat sat on the dog")


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.exhaustive)])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tiny | Onboarded:
    return DEMO if request.param == "demo" else speaking_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(model: Tiny | Onboarded) -> Iterator[tuple[str, Service]]:
    with served(model) as found:
        yield found


class Crowd:
    """Draws requests, and compares their answers with those of the engine alone."""

    def __init__(self, address: str, model: Tiny | Onboarded) -> None:
        self.address = address
        self.seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._client = httpx.Client(timeout=SECONDS, limits=httpx.Limits(max_connections=None))
        llm = LLM(model.checkpoint, root=model.root, device="cpu", dtype="float32")
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate(list(TEXTS), params)
        self._tokens = {text: each.token_ids for text, each in zip(TEXTS, outputs, strict=True)}
        tokenizer = llm.engine.tokenizer
        self._decode = lambda ids: tokenizer.decode(ids)

    def one(self, seed: int) -> None:
        """Make one request, well (95 of 100) or not."""
        rng = random.Random(seed)
        body = {"prompt": rng.choice(TEXTS), "max_tokens": rng.randint(1, 24), "temperature": 0}
        body |= {"ignore_eos": True, "stream": rng.random() < 0.5}
        kind = rng.choice(["broken", "cut", "slow"]) if rng.random() < 0.05 else "well"
        getattr(self, kind)(body, rng)
        with self._lock:
            self.seen[kind] += 1

    def well(self, body: dict[str, Any], rng: random.Random) -> None:
        answer = self._client.post(f"{self.address}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        self._compare(body, answer.text)

    def broken(self, body: dict[str, Any], rng: random.Random) -> None:
        text = json.dumps(body)
        sent = rng.choice([text[: rng.randrange(len(text))], "[" * 99, '{"prompt": [[0.5]]}'])
        answer = self._client.post(f"{self.address}/v1/completions", content=sent)
        assert answer.status_code == 400, answer.text

    def cut(self, body: dict[str, Any], rng: random.Random) -> None:
        """Go away, within the request or behind it."""
        raw = self._raw(body | {"max_tokens": 900})
        with self._connection() as connection:
            connection.sendall(raw if rng.random() < 0.5 else raw[: rng.randrange(1, len(raw))])

    def slow(self, body: dict[str, Any], rng: random.Random) -> None:
        """Send the request in many small parts, and read the answer byte by byte."""
        raw = self._raw(body)
        with self._connection() as connection:
            for start in range(0, len(raw), 16):
                connection.sendall(raw[start : start + 16])
            found = b""
            while part := connection.recv(7):
                found += part
        head, _, rest = found.partition(b"\r\n\r\n")
        assert head.split()[1] == b"200", found
        if b"chunked" in head:
            rest = b"".join(line for line in rest.splitlines(keepends=True) if b"{" in line)
            rest = rest.replace(b"\r\n", b"\n")
        self._compare(body, rest.decode())

    def _compare(self, body: dict[str, Any], text: str) -> None:
        if body["stream"]:
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
            choices = [choice for line in lines for choice in json.loads(line)["choices"]]
            found = "".join(choice["text"] for choice in choices)
        else:
            [choice] = json.loads(text)["choices"]
            found = choice["text"]
        assert found == self._decode(self._tokens[body["prompt"]][: body["max_tokens"]])

    def _connection(self) -> socket.socket:
        parts = urlsplit(self.address)
        return socket.create_connection((parts.hostname, parts.port), timeout=SECONDS)

    def _raw(self, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_each_has_its_own_answer(server: tuple[str, Service], model: Tiny | Onboarded) -> None:
    requests, clients = (10_000, 64) if model is DEMO else (200, 16)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    address, service = server
    crowd = Crowd(address, model)
    with ThreadPoolExecutor(clients) as pool:
        for first in (0, requests // 2):
            half = range(seed + first, seed + first + requests // 2)
            list(pool.map(crowd.one, half))
            if not first:
                before = resident()
    assert sum(crowd.seen.values()) == requests
    engine, thread = service.llm.llm.engine, service.llm.thread
    wait_until(lambda: not thread.running)  # of those that went away
    assert not engine.scheduler.busy
    engine.memory.check()
    assert engine.memory.num_owned == 0
    grown = resident() - before
    print(f"{crowd.seen}, {grown / 2**20:.1f} MiB more than after the first half")
    assert grown < 64 << 20

"""`onboard serve --replicas` on a real cluster: one replica is killed and all are restarted under
load, and every client gets what one model alone says. Needs the extra `ray`; a minute on two cores.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from onboard import LLM, SamplingParams
from tests.support.runtime.tiny import Tiny
from tests.support.serving import speaking_model

_PATIENCE = 240.0
_CLIENTS = 12


def wait_for(seen: Callable[[], Any]) -> Any:
    end = time.monotonic() + _PATIENCE
    while not (found := seen()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)
    return found


def processes() -> dict[int, tuple[int, str]]:
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()[1:]]
    return {int(row[0]): (int(row[1]), row[2]) for row in rows if len(row) == 3}


def descendants(pid: int) -> dict[int, str]:
    """The processes below one, and their command lines."""
    rows, found = processes(), [pid]
    for parent in found:
        found += [child for child, (its_parent, _) in rows.items() if its_parent == parent]
    return {child: rows[child][1] for child in found[1:] if "<defunct>" not in rows[child][1]}


def replicas_of(pid: int) -> list[int]:
    return [child for child, args in descendants(pid).items() if args.startswith("ray::ServeRep")]


class Served:
    """The command, and what it has said."""

    def __init__(self, model: Tiny) -> None:
        command = [sys.executable, "-m", "onboard", "serve", str(model.checkpoint), "--root"]
        command += [str(model.root), "--device", "cpu", "--dtype", "float32", "--port", "0"]
        command += ["--name", "tiny", "--replicas", "2", "--drain-seconds", "60"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        self.said += stream  # line by line, as they come

    def heard(self, text: str) -> str:
        return wait_for(lambda: next((line for line in list(self.said) if text in line), ""))


@pytest.fixture
def model(tmp_path: Path) -> Tiny:
    reason = "the extra `ray` is not installed"
    pytest.importorskip("ray.serve", reason=reason, exc_type=ImportError)
    return speaking_model(tmp_path)


@pytest.fixture
def served(model: Tiny) -> Iterator[Served]:
    started = Served(model)
    yield started
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGTERM)
        started.process.wait(_PATIENCE)


def ask(address: str, prompt: str, seed: int, tokens: int, stream: bool) -> str:
    body = {"prompt": prompt, "seed": seed, "max_tokens": tokens, "stream": stream}
    body |= {"temperature": 1.0, "ignore_eos": True}
    with httpx.Client(timeout=_PATIENCE) as client:
        answer = client.post(f"{address}/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["choices"][0]["text"]
    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    return "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1])


def ports_of(pid: int) -> list[int]:
    """The ports that a process listens to: its sockets, as the kernel lists them."""
    own = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(each))
    tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return [int(row[1].rpartition(":")[2], 16) for row in listening]


def asked_by_a_stranger(port: int) -> str:
    """What a replica says to a call without the cluster's token."""
    import grpc
    from ray.serve.generated.serve_pb2 import ASGIRequest
    from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = ASGIServiceStub(channel)
        try:
            list(stub.HandleRequestStreaming(ASGIRequest(pickled_request_metadata=b""), timeout=20))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


@pytest.mark.exhaustive
def test_no_request_is_lost_by_a_kill_or_a_restart(model: Tiny, served: Served) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = ["the cat", "the dog sat on", "on the mat and the dog"]
    limits = {"max_batch_size": 8, "max_seq_len": 1024}
    alone = LLM(model.checkpoint, root=model.root, device="cpu", dtype="float32", settings=limits)
    address = served.heard("serving tiny at ").split()[3].rstrip(",")
    over = threading.Event()

    def one_client(number: int) -> list[tuple[Any, ...]]:
        found, own = [], random.Random(seed + number)
        while not over.is_set():
            case = own.choice(prompts), own.randrange(1000), own.randint(20, 200)
            found.append((*case, ask(address, *case, own.random() < 0.8)))
        return found

    with ThreadPoolExecutor(_CLIENTS) as pool:
        clients = [pool.submit(one_client, number) for number in range(_CLIENTS)]
        try:
            time.sleep(3)
            first = set(wait_for(lambda: replicas_of(served.process.pid)))
            assert len(first) == 2
            os.kill(rng.choice(sorted(first)), signal.SIGKILL)
            served.heard("a replica was lost")
            wait_for(lambda: len(set(replicas_of(served.process.pid))) == 2)
            served.process.send_signal(signal.SIGHUP)
            served.heard("the replicas have been restarted")
            assert not first & set(replicas_of(served.process.pid)), "an old one is there"
        finally:
            over.set()
        answers = [answer for client in clients for answer in client.result()]
    print(f"{len(answers)} answers")
    assert len(answers) > _CLIENTS
    for prompt, number, tokens, text in rng.sample(answers, min(len(answers), 60)):
        params = SamplingParams(seed=number, max_tokens=tokens, ignore_eos=True)
        assert text == alone.generate([prompt], params)[0].text

    everything = descendants(served.process.pid)
    refused = [asked_by_a_stranger(port) for port in ports_of(replicas_of(served.process.pid)[0])]
    assert "UNAUTHENTICATED" in refused, refused
    assert "OK" not in refused
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(_PATIENCE) == 0
    wait_for(lambda: not everything.keys() & processes().keys())

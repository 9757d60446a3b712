"""Ranks that torchrun starts: pipeline stages and shares, which find one another by its environment,
and end together.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from onboard import LLM, SamplingParams
from onboard.errors import OnboardError, UsageError
from onboard.parallel import launched_ranks
from onboard.parallel.ranks import Ranks
from onboard.runtime.ranks import leading
from onboard.testing.prompts import ragged_prompts
from tests.support.sharding.zoo import ROOT, save_family

SOON = 10.0
"""Seconds after which nobody waits any more."""
STAGES = {"dist_mapping": {"pp": 2}, "max_seq_len": 64, "max_batch_size": 4}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SCRIPT = """
import json, sys
from onboard import LLM, SamplingParams
from onboard.errors import OnboardError
told = json.loads(sys.argv[1])
llm = LLM(told["model"], told["root"], device="cpu", world_size=2, settings=told["settings"])
params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
found = [list(each.token_ids) for each in llm.generate(told["prompts"], params)]
print(json.dumps(found), flush=True)
for _ in range(1000 * told["goes_on"]):
    try:
        llm.generate(told["prompts"] * 4, params)
    except OnboardError as error:
        sys.exit(f"onboard: {error}")
llm.close()
"""
Start = Callable[..., list[subprocess.Popen[str]]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def both(told: Mapping[str, Any]) -> list[subprocess.Popen[str]]:
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(2):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, json.dumps(told)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **shared, **own},
            )
            processes.append(process)
        return processes

    yield both
    for process in processes:
        process.kill()
        process.communicate()


def test_stages_of_a_launcher_choose_the_tokens_of_one_process_and_end_together(
    tmp_path: Path, start: Start
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    checkpoint = save_family(tmp_path, "llama", seed)
    alone = LLM(checkpoint, ROOT, device="cpu", settings=STAGES | {"dist_mapping": {}})
    prompts = ragged_prompts(int(alone.engine.vocab_size or 0), (3, 17, 9), seed)
    told = {"model": str(checkpoint), "root": str(ROOT), "settings": STAGES, "prompts": prompts}
    first, second = start({**told, "goes_on": 1})
    expected = [list(each.token_ids) for each in alone.generate(prompts, GREEDY)]
    assert first.stdout is not None
    assert json.loads(first.stdout.readline() or "[]") == expected
    second.kill()
    since = time.monotonic()
    said = first.communicate(timeout=SOON)[1]
    assert time.monotonic() - since < SOON
    assert first.returncode == 1
    lines = [line for line in said.splitlines() if line.startswith("onboard: ")]
    assert lines == ["onboard: rank 1: its process has ended"]


@pytest.mark.exhaustive  # two more processes
def test_when_the_first_rank_ends_the_others_do(tmp_path: Path, start: Start) -> None:
    checkpoint = save_family(tmp_path, "llama", 1)
    told = {"model": str(checkpoint), "root": str(ROOT), "settings": STAGES, "prompts": [[1, 2]]}
    first, second = start({**told, "goes_on": 0})
    assert first.communicate(timeout=120)[0].startswith("[[")
    assert first.returncode == 0
    assert second.communicate(timeout=SOON)[0] == ""
    assert second.returncode == 0


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_all(**changed: str) -> None:
        values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (values | {"MASTER_PORT": str(free_port())} | changed).items():
            monkeypatch.setenv(name, value)

    return set_all


def test_who_a_launcher_has_started_is_read_off_its_environment(
    environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(RANK="1", WORLD_SIZE="3")
    assert launched_ranks.launched_ranks() == Ranks(1, 3)
    environment(WORLD_SIZE="1")
    assert launched_ranks.launched_ranks() is None
    environment(RANK="first")
    with pytest.raises(UsageError, match="no numbers"):
        launched_ranks.launched_ranks()
    monkeypatch.delenv("MASTER_ADDR")
    assert launched_ranks.launched_ranks() is None


def test_another_world_size_than_the_launchers_is_refused(
    environment: Callable[..., None], tmp_path: Path
) -> None:
    environment(WORLD_SIZE="4")
    checkpoint = save_family(tmp_path, "llama", 1)
    with pytest.raises(UsageError, match="4 processes for a world_size of 2") as raised:
        LLM(checkpoint, ROOT, device="cpu", world_size=2)
    assert raised.value.exit_code == 2


def test_a_rank_that_does_not_come_is_named_and_strangers_are_none(
    environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment()
    monkeypatch.setattr(launched_ranks, "_PATIENCE", 1.0)
    monkeypatch.setattr(launched_ranks, "_met", False)
    with socket.create_server(("", 0)) as server:
        stranger = socket.create_connection(server.getsockname()[:2])
        stranger.close()
        with pytest.raises(OnboardError, match="rank 1 did not come within 1 s"):
            launched_ranks._accepted(server, b"word", 2)
    monkeypatch.setattr(launched_ranks, "_met", True)
    with pytest.raises(OnboardError, match="the launcher's ranks ended"):
        leading._started(2, "cpu")

"""Ranks that fail, or are ended: one line says why, soon, and no process is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard import LLM, SamplingParams
from onboard.errors import OnboardError, UsageError
from onboard.parallel import workers as parallel
from onboard.parallel.ranks import current_ranks
from onboard.parallel.workers import Workers, start_workers
from tests.support.sharding.zoo import ROOT, save_family
from tests.support.warm import Warm

SOON = 10.0
"""Seconds after which nobody waits any more."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("llama"), "llama", 1)


@contextmanager
def met() -> Iterator[Workers]:
    workers = start_workers(2)
    try:
        workers.meet("cpu")
        yield workers
    finally:
        workers.close(orderly=False)


def _nothing(_: Any) -> None:
    """A first job, with which a rank imports this module."""


def _without_memory(_: Any) -> None:
    raise MemoryError("8 GiB asked for")


def _waits_for_a_rank_without_memory(workers: Workers) -> None:
    with workers.together():
        workers.begin(_without_memory)
        torch.distributed.all_reduce(torch.ones(1))


def ended(workers: Workers) -> bool:
    return all(
        link.process is not None and link.process.poll() is not None for link in workers.links
    )


def test_a_rank_that_is_killed_ends_the_generation(llama: Path) -> None:
    llm = LLM(llama, ROOT, device="cpu", world_size=2)
    assert llm.ranks is not None
    workers = llm.ranks.workers
    process = workers.links[0].process
    assert process is not None
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        process.kill()

    threading.Timer(0.5, kill).start()
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    many = [[1, 2, 3]] * 2000
    with pytest.raises(OnboardError, match="rank 1: its process was ended by signal 9"):
        llm.generate(many, params)
    assert time.monotonic() - killed[0] < SOON
    assert ended(workers)
    with pytest.raises(OnboardError, match="rank 1"):
        llm.generate([[1, 2, 3]], params)
    llm.close()
    assert current_ranks().is_alone


def test_a_rank_without_memory_says_so_and_ends_all() -> None:
    with met() as workers:
        with workers.together():
            workers.begin(_nothing)
            workers.answers()
        start = time.monotonic()
        with pytest.raises(OnboardError, match=r"rank 1: its memory .*8 GiB asked for") as raised:
            _waits_for_a_rank_without_memory(workers)
        assert raised.value.exit_code == 1
        assert time.monotonic() - start < SOON
        assert ended(workers)


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = parallel.identity()
    monkeypatch.setattr(parallel, "identity", lambda: own | {"torch": "1.0"})
    with pytest.raises(UsageError, match=r"rank 1 has torch .* and rank 0 has 1\.0"), met():
        pass
    assert current_ranks().is_alone


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "onboard: interrupted"), (signal.SIGKILL, -1, "")],
)
def test_when_the_first_rank_is_ended_no_process_is_left(
    llama: Path, warm: Warm, number: int, code: int, line: str
) -> None:
    words = ["run", str(llama), "--root", str(ROOT), "--device", "cpu", "--world-size", "2"]
    words += ["--token-ids", "1,2,3", "--max-tokens", "40", "--ignore-eos", "-n", "2000"]
    reading, writing = os.pipe()
    with (
        os.fdopen(reading) as lines,
        os.fdopen(writing, "w") as errors,
        warm.started("onboard", *words, errors=errors) as (process, _),
    ):
        errors.close()
        try:
            said = [lines.readline()]
            while "loaded" not in said[-1]:
                assert said[-1], "".join(said)
                said.append(lines.readline())
            said.append(lines.readline())
            assert said[-1].startswith("rank 0: ")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert children
            time.sleep(0.5)
            os.kill(process.pid, number)
            until = time.monotonic() + SOON
            while any(_lives(each) for each in (process.pid, *children)):
                assert time.monotonic() < until, "a rank is left"
                time.sleep(0.1)
        finally:
            os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == code
        assert line in lines.read()


def _lives(pid: int | str) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and ") Z " not in state.read_text()

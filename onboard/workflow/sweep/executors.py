"""Where jobs run: on this machine, one worker a core or a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from onboard.gpu import list_gpus
from onboard.workflow.sweep.job import Job
from onboard.workflow.sweep.target_record import TargetRecord

Started = Callable[[Job], None]
_QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
_PATIENCE = 10.0
"""Seconds that a worker has to end after it was asked to."""


class Executor(Protocol):
    """Runs jobs, in any order."""

    def run(self, jobs: Sequence[Job], started: Started) -> Iterator[tuple[Job, TargetRecord]]:
        """Yield each job with its record as it ends; call `started` when one begins."""


@dataclass
class LocalExecutor:
    """`workers` processes of this machine; with CUDA each sees as many GPUs as it has ranks."""

    workers: int
    gpus: int = 0
    world_size: int = 1
    _idle: SimpleQueue[Worker] = field(default_factory=SimpleQueue, init=False)

    def run(self, jobs: Sequence[Job], started: Started) -> Iterator[tuple[Job, TargetRecord]]:
        """Run the jobs in order, each on the worker that is free next."""
        workers = [Worker(self._gpus_of(index)) for index in range(min(self.workers, len(jobs)))]
        for worker in workers:
            self._idle.put(worker)
        pool = ThreadPoolExecutor(max_workers=max(1, len(workers)))
        try:
            futures = {pool.submit(self._one, job, started): job for job in jobs}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.close()

    def _gpus_of(self, index: int) -> list[int]:
        """Return the GPUs of a worker, those of its own as far as there are any."""
        first = index * self.world_size
        return [each % self.gpus for each in range(first, first + self.world_size) if self.gpus]

    def _one(self, job: Job, started: Started) -> TargetRecord:
        worker = self._idle.get()
        try:
            started(job)
            return worker.do(job)
        finally:
            self._idle.put(worker)


class Worker:
    """A worker process, started when it is first needed, and again after it died."""

    def __init__(self, gpus: Sequence[int] = ()) -> None:
        self._gpus = gpus
        self._process: subprocess.Popen[str] | None = None

    def do(self, job: Job) -> TargetRecord:
        """Have one job done."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(job.model_dump_json() + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            self.close()
            return TargetRecord(target=job.target, end="lost", detail="its worker died")
        return TargetRecord.model_validate_json(answer)

    def close(self) -> None:
        """End the process: at once, with the child that it may be waiting for."""
        process, self._process = self._process, None  # another thread may be waiting for its answer
        if process is not None:
            process.terminate()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            environment = {**os.environ, **_QUIET}
            if self._gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._gpus))
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "onboard.workflow.sweep.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        return self._process


def local_executor(device: str, jobs: int | None, world_size: int = 1) -> LocalExecutor:
    """Return an executor with a worker for each `world_size` cores or GPUs, or with `jobs` of
    them.
    """
    gpus = len(list_gpus()) if device == "cuda" else 0
    places = gpus or len(os.sched_getaffinity(0))
    return LocalExecutor(jobs or max(1, places // world_size), gpus, world_size)

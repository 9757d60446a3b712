"""Where jobs run: on a Ray cluster, one worker a core or a GPU of it.

The nodes share nothing with the driver but the same onboard, transformers and torch: a job runs in
a temporary folder of its node, and what is in there when it has ended comes back with its record.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.parallel.ray_cluster import cluster, cluster_address, import_ray, last_line
from onboard.workflow.run_state import current_versions
from onboard.workflow.sweep.executors import Started, Worker
from onboard.workflow.sweep.job import Job
from onboard.workflow.sweep.store import source_hash
from onboard.workflow.sweep.target_record import TargetRecord

_PATIENCE = 60.0
"""Seconds that a cluster may take to start the first slot, or the next one when all were lost."""
_NEEDING = "--executor ray needs"
_FAREWELL = 10.0
"""Seconds that the slots have to end what they are doing."""


class Slot:
    """A worker on some node: the class of the actors."""

    def __init__(self, folder: str | None) -> None:
        self._worker = Worker()
        self._folder = folder
        """Where temporary folders lie; None: where the node has them."""

    def identity(self) -> dict[str, str]:
        """Return what has to be the same everywhere: the code's hash and the versions."""
        return {"source": source_hash(), **current_versions()}

    def do(self, text: str) -> tuple[str, bytes]:
        """Have a job (JSON) done; return its record (JSON) and its folder (tar)."""
        job = Job.model_validate_json(text)
        with tempfile.TemporaryDirectory(prefix="onboard-sweep-", dir=self._folder) as name:
            folder = Path(name, job.target.folder)
            record = self._worker.do(job.model_copy(update={"folder": folder}))
            return record.model_dump_json(), pack(folder)

    def close(self) -> None:
        """End the worker, and with it the job that it is doing."""
        self._worker.close()


def pack(folder: Path) -> bytes:
    """Return a tar of the files in `folder`, without links; of no folder an empty one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        if folder.is_dir():
            archive.add(
                folder,
                arcname=".",
                filter=lambda member: member if member.isfile() or member.isdir() else None,
            )
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Make `folder` what `pack` was given."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")


@dataclass
class RayExecutor:
    """`workers` slots (None: as many as fit) of the cluster at `address`; `LOCAL` starts one on
    this machine.
    """

    address: str
    workers: int | None
    uses_gpus: bool

    def run(self, jobs: Sequence[Job], started: Started) -> Iterator[tuple[Job, TargetRecord]]:
        """Run the jobs in order, each on the slot that is free next."""
        ray = import_ray(_NEEDING, self.address)
        cores = self.workers or len(os.sched_getaffinity(0))
        with cluster(ray, self.address, cores) as folder:
            resource = "GPU" if self.uses_gpus else "CPU"
            room = int(ray.cluster_resources().get(resource, 0))
            slots = _Slots(ray, folder, {f"num_{resource.lower()}s": 1}, jobs, started)
            yield from slots.run(min(self.workers or max(room, 1), len(jobs)))


@dataclass
class _Slots:
    """The actors of one run. Each call of one is a future: the identity first, then a job at a
    time.
    """

    ray: Any
    folder: str | None
    resources: dict[str, int]
    jobs: Sequence[Job]
    started: Started
    expected: dict[str, str] = field(
        default_factory=lambda: {"source": source_hash(), **current_versions()}
    )
    greeted: dict[Any, Any] = field(default_factory=dict)
    """Future identity -> its actor, which has not yet said anything."""
    working: dict[Any, tuple[Any, Job]] = field(default_factory=dict)
    """Future record -> its actor and job."""
    ready: list[Any] = field(default_factory=list)
    """Actors that have a worker."""

    def run(self, count: int) -> Iterator[tuple[Job, TargetRecord]]:
        """Yield each job with its record, from `count` actors."""
        waiting = deque(self.jobs)
        for _ in range(count):
            self._hire()
        try:
            while waiting or self.working:
                future = self._next()
                if future in self.greeted:
                    actor = self._greet(future)
                else:
                    actor, job, record = self._collect(future)
                    yield job, record
                if waiting and actor is not None:
                    self._give(actor, waiting.popleft())
                elif waiting:
                    self._hire()
        finally:
            self._dismiss()

    def _next(self) -> Any:
        """Wait for one future; a slot that does not come is waited for only while another one
        works.
        """
        timeout = None if self.working else _PATIENCE
        done, _ = self.ray.wait([*self.greeted, *self.working], timeout=timeout)
        if not done:
            raise OnboardError(
                f"no slot with {self.resources} started on the Ray cluster within {_PATIENCE:.0f} s",
                hint="See with `ray status` what it has free, or run without --executor ray",
            )
        return done[0]

    def _hire(self) -> None:
        actor = (
            self.ray.remote(Slot).options(**self.resources, max_concurrency=2).remote(self.folder)
        )
        self.greeted[actor.identity.remote()] = actor

    def _greet(self, future: Any) -> Any:
        """Return the actor, unless it is lost; one that runs other code would give records of
        another program.
        """
        actor = self.greeted.pop(future)
        try:
            found = self.ray.get(future)
        except self.ray.exceptions.RayActorError:
            return None
        except self.ray.exceptions.RayError as error:
            raise OnboardError(
                f"a node of the Ray cluster cannot run onboard: {last_line(error)}",
                hint="Install the same onboard there",
            ) from error
        if found != self.expected:
            other = [
                f"{name} {found.get(name)}"
                for name in self.expected
                if found.get(name) != self.expected[name]
            ]
            raise OnboardError(
                f"a node of the Ray cluster has other code: {', '.join(other)}",
                hint="Install there what is installed here",
            )
        self.ready.append(actor)
        return actor

    def _give(self, actor: Any, job: Job) -> None:
        self.started(job)
        self.working[actor.do.remote(job.model_dump_json())] = actor, job

    def _collect(self, future: Any) -> tuple[Any, Job, TargetRecord]:
        """Return the actor (None: it is lost), its job and its record, with the folder in its
        place.
        """
        actor, job = self.working.pop(future)
        try:
            record, files = self.ray.get(future)
        except self.ray.exceptions.RayError as error:
            self.ray.kill(actor)
            detail = f"its Ray slot was lost: {last_line(error)}"
            return (
                None,
                job,
                TargetRecord(target=job.target, mode=job.mode, end="lost", detail=detail),
            )
        unpack(files, job.folder)
        return actor, job, TargetRecord.model_validate_json(record)

    def _dismiss(self) -> None:
        """End all actors and what they are doing: asked first, so that they clean up after
        themselves.
        """
        ending = [*(actor.close.remote() for actor in self.ready), *self.working]
        if ending:
            self.ray.wait(ending, num_returns=len(ending), timeout=_FAREWELL)
        for actor in [*self.greeted.values(), *self.ready]:
            self.ray.kill(actor)


def ray_executor(device: str, jobs: int | None, address: str | None) -> RayExecutor:
    """Return an executor on the cluster at `address`, at the one that RAY_ADDRESS names, or on a
    local one.
    """
    address = cluster_address(address)
    import_ray(_NEEDING, address)
    return RayExecutor(address, jobs, device == "cuda")

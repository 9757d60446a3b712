"""Answers the requests of a file, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import UsageError
from onboard.runtime.calls.async_llm import AsyncLLM
from onboard.runtime.llm import LLM
from onboard.runtime.resolve import find_checkpoint
from onboard.serve.batch.batch_lines import Line, read_lines
from onboard.serve.batch.batch_records import Records, answered, refused
from onboard.serve.dialects.events import told
from onboard.serve.dialects.paths import DIALECTS
from onboard.serve.serve_settings import ServeSettings
from onboard.serve.service import Service

_FOR_EACH_PLACE = 2
"""Requests under way for each place in the batch: the next one waits when a place is free."""


@dataclass(frozen=True)
class BatchCount:
    """How many requests there are, and what has become of them."""

    requests: int
    before: int
    """Those that had a record already."""
    done: int
    refused: int


@dataclass(frozen=True)
class BatchJob:
    """What a file of requests is answered with; `defaults` and `system` as in `read_lines`."""

    requests: Path
    answers: Path
    defaults: Mapping[str, Any]
    system: str | None = None

    def lines(self) -> Iterator[Line]:
        """Yield the requests."""
        return read_lines(self.requests, self.defaults, self.system)

    def ids(self) -> list[str]:
        """Return what tells the requests apart; raise `UsageError` for a file without any."""
        if self.answers.exists() and self.answers.samefile(self.requests):
            raise UsageError(f"{self.answers} has the requests", hint="Name another --output")
        found = [line.id for line in self.lines()]
        if not found:
            raise UsageError(f"{self.requests} has no requests")
        return found


def answer_file(llm: LLM, model: str, job: BatchJob, tell: Callable[[int], None]) -> BatchCount:
    """Answer the requests that have no answer yet; `tell` hears how many have.

    `llm` is not to be called afterwards. Few more requests are under way than run in a batch, so a
    file may be of any length.
    """
    names = list(dict.fromkeys([model, Path(model).name]))
    at_once = _FOR_EACH_PLACE * llm.engine.limits["max_batch_size"]
    settings = ServeSettings(names=names, max_running=at_once)

    async def run() -> BatchCount:
        many = AsyncLLM.over(llm)
        service = Service(many, settings, find_checkpoint(llm.runtime))
        try:
            return await _answered(service, job, tell)
        finally:
            service.close()
            await many.close(timeout=0)

    return asyncio.run(run())


async def _answered(service: Service, job: BatchJob, tell: Callable[[int], None]) -> BatchCount:
    ids = job.ids()
    gate = asyncio.Semaphore(service.settings.max_running)
    with Records(job.answers, set(ids)) as records:
        before = len(records.done)

        async def one(line: Line) -> None:
            try:
                records.add(await _answer(service, line))
                tell(len(records.done))
            finally:
                gate.release()

        async with asyncio.TaskGroup() as group:
            for line in job.lines():
                if line.id not in records.done:
                    await gate.acquire()
                    group.create_task(one(line))
        done = records.done.values()
        return BatchCount(len(ids), before, len(done), len(done) - sum(done))


async def _answer(service: Service, line: Line) -> dict[str, Any]:
    """Return the record of one request."""
    try:
        if line.problem is not None:
            raise line.problem
        dialect = DIALECTS[line.path]
        asked = dialect.asked(service, dialect.body.read(line.body))
        await asked.prepare()
        return answered(line, await asked.whole())
    except Exception as error:
        return refused(line, told(error))

"""Goes over targets: takes what is known, runs the rest, hands out each entry as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onboard.config import Mode, suggest
from onboard.errors import UsageError
from onboard.workflow.phases import PHASES
from onboard.workflow.sweep.executors import Executor, Started
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.job import Job
from onboard.workflow.sweep.store import (
    job_key,
    load_record,
    save_record,
    source_hash,
    sweep_folder,
)
from onboard.workflow.sweep.target_record import Entry, conclude


@dataclass(frozen=True)
class SweepOptions:
    """How every target is onboarded."""

    until: str = PHASES[-1]
    mode: Mode = "graph"
    device: str = "cpu"
    seconds: float = 600.0
    """Time limit of one target."""
    gibibytes: float = 8.0
    """Memory limit of each process of a target."""
    fresh: bool = False
    """Run what is known, too."""
    world_size: int = 1
    """Ranks on which the judge runs what was onboarded. Tests are of one device: with several ranks
    `until` may come before them.
    """

    def __post_init__(self) -> None:
        if self.until not in PHASES:
            raise UsageError(f"there is no phase {self.until!r}", hint=suggest(self.until, PHASES))
        least = "test" if self.world_size == 1 else "generate"
        if PHASES.index(self.until) < PHASES.index(least):
            raise UsageError(
                f"{self.until} is too early to show what works", hint=f"The first is {least}"
            )
        if self.mode == "transformers" and self.world_size > 1:
            raise UsageError("mode transformers runs on one device", hint="Leave out --world-size")
        for name, value in (("--limit-seconds", self.seconds), ("--limit-memory", self.gibibytes)):
            if not value > 0:
                raise UsageError(f"{name} {value} is no limit", hint="Give a number above zero")


@dataclass
class Sweep:
    """One pass over `targets` under `root`."""

    targets: Sequence[Target]
    root: Path
    options: SweepOptions
    source: str = field(default_factory=source_hash)

    def run(self, executor: Executor, started: Started) -> Iterator[tuple[Entry, bool]]:
        """Yield each target's entry as it comes, and whether it was run now; the known ones
        first.
        """
        keys = {job.folder: job_key(job, self.source) for job in self.jobs()}
        waiting = []
        for job in self.jobs():
            known = None if self.options.fresh else load_record(job, keys[job.folder])
            if known is None:
                waiting.append(job)
            else:
                yield conclude(known, self.options.until), False
        for job, record in executor.run(waiting, started) if waiting else ():
            save_record(job, keys[job.folder], record)
            yield conclude(record, self.options.until), True

    def jobs(self) -> list[Job]:
        """Return a job for each target."""
        return [self._job(target) for target in self.targets]

    @property
    def _subfolder(self) -> str:
        """Where results of another mode or world size than the usual one lie."""
        options = self.options
        mode = "" if options.mode == "graph" else f"mode-{options.mode}"
        ranks = "" if options.world_size == 1 else f"ranks-{options.world_size}"
        return "-".join(filter(None, (mode, ranks)))

    def _job(self, target: Target) -> Job:
        return Job(
            target=target,
            folder=sweep_folder(self.root) / self._subfolder / target.folder,
            mode=self.options.mode,
            until=self.options.until,
            device=self.options.device,
            seconds=self.options.seconds,
            gibibytes=self.options.gibibytes,
            world_size=self.options.world_size,
        )

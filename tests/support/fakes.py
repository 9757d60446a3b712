"""Small phases, and a program that runs them slowly enough to be killed in between."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from onboard.workflow.files import write_atomically
from onboard.workflow.outcome import PhaseOutcome
from onboard.workflow.phase import Phase, PhaseResult, RunContext, RunOptions
from onboard.workflow.phase_runner import PhaseRunner, open_run

Work = Callable[[RunContext], dict[str, str]]


class Fake(Phase):
    """A phase made of two functions; counts how often it ran."""

    name = "fake"

    def __init__(
        self, name: str, inputs: Callable[[RunContext], dict[str, Any]], work: Work
    ) -> None:
        self.name = name  # type: ignore[misc]
        self._inputs, self._work = inputs, work
        self.runs = 0

    def inputs(self, context: RunContext) -> dict[str, Any]:
        return self._inputs(context)

    def run(self, context: RunContext) -> PhaseResult:
        self.runs += 1
        return PhaseResult(self._work(context), f"{self.name} says so")


def copying(name: str, source: str | None, target: str) -> Fake:
    """A phase whose file is its input file's text with its own name added; the first one reads the
    model's file.
    """

    def origin(context: RunContext) -> Path:
        return context.artifact(source) if source else context.source.files() / "config.json"

    def work(context: RunContext) -> dict[str, str]:
        path = context.artifact(target)
        context.files.write(path, f"{context.files.read(origin(context))}{name}\n")
        return {target: context.relative(path)}

    def inputs(context: RunContext) -> dict[str, Any]:
        return {"digest": context.files.digest(origin(context))}

    return Fake(name, inputs, work)


@dataclass
class Recorder:
    """An observer that keeps what it hears."""

    heard: list[tuple[str, str]] = field(default_factory=list)

    def waiting(self) -> None:
        self.heard.append(("", "waiting"))

    def started(self, name: str) -> None:
        self.heard.append((name, "started"))

    def doing(self, text: str) -> None:
        self.heard.append((text, "doing"))

    def finished(self, outcome: PhaseOutcome) -> None:
        self.heard.append((outcome.name, outcome.status))


def slow_phases(pause: float) -> list[Phase]:
    """Five phases in a chain, of several files each; two of them share files with other models."""

    def slowly(context: RunContext, name: str) -> dict[str, str]:
        paths = [context.artifact(f"{name}-{index}.txt") for index in range(3)]
        for path in paths:
            time.sleep(pause)
            context.files.write(path, f"{context.model} {path.name}\n" * 2000)
        return {path.name: context.relative(path) for path in paths}

    def shared(context: RunContext) -> dict[str, str]:
        path = context.root / "registry" / "models.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(".lock")):
            lines = path.read_text().splitlines() if path.exists() else []
            time.sleep(pause)
            names = sorted({*lines, context.work_dir.name})
            write_atomically(path, "\n".join(names) + "\n", staging=context.files.staging)
        return {"registry": context.relative(path)}

    def model_file(context: RunContext) -> dict[str, str]:
        path = context.root / "models" / "modeling_fake.py"
        time.sleep(pause)
        context.files.write(path, "MODEL = 1\n" * 20_000)
        return {"model": context.relative(path)}

    def nothing(_: RunContext) -> dict[str, Any]:
        return {}

    phases: list[Phase] = [
        Fake(name, nothing, lambda c, name=name: slowly(c, name)) for name in ("one", "two")
    ]
    return [
        *phases,
        Fake("three", nothing, model_file),
        Fake("four", nothing, shared),
        copying("five", "two-2.txt", "z"),
    ]


def main() -> None:
    """`fakes.py MODEL ROOT PAUSE`: run the slow phases; print "ready" before the first one."""
    model, root, pause = sys.argv[1:]
    context = open_run(model, Path(root), RunOptions())
    print("ready", flush=True)
    outcome = PhaseRunner(slow_phases(float(pause)), Recorder()).run(context)
    if outcome.exception is not None:
        raise outcome.exception
    print(*(f"{phase.name}:{phase.status}" for phase in outcome.phases))


if __name__ == "__main__":
    main()

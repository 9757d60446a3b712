"""Runs entries, each in a process of its own with a log of its own; what each showed is written as
it ends.

Killed, and started again, it goes on: an entry that passed under the same files, config and program
is not run again. Two at once share a root: an entry is locked while it runs, and rows are written
under the registry's lock.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from onboard import registry
from onboard.registry import RegistryEntry
from onboard.registry_text import insert_entry, set_fields
from onboard.workflow import run_model
from onboard.workflow.files import write_atomically
from onboard.workflow.lock import WORK
from onboard.workflow.registry_results import (
    Result,
    load_results,
    result_of,
    results_path,
    text_of,
    with_result,
    with_tests,
)
from onboard.workflow.registry_runs.chosen_entries import key_of, model_file, reduced_layers, row_of
from onboard.workflow.registry_runs.places import Place, Places
from onboard.workflow.reporting.support_matrix import empty_matrix, matrix_path, refreshed
from onboard.workflow.sweep.store import source_hash

FOLDER, LOG, OUTPUT = "registry_runs", "run.log", "agent.json"
_PATIENCE = 10.0
"""Seconds that a process has to end after it was asked to."""


class Progress(Protocol):
    """Who is told what happens."""

    def waiting(self, name: str, why: str) -> None:
        """An entry cannot start yet."""

    def started(self, name: str, log: Path) -> None:
        """An entry's process begins."""


@dataclass(frozen=True)
class RunSettings:
    """How entries are run."""

    device: str = "cpu"
    jobs: int = 1
    reduced: bool = False
    changed: bool = False
    """Only entries whose row was made from other files, another config or another program."""
    fresh: bool = False
    """Also entries that passed as they are."""
    seconds: float = 3600.0
    """Time limit of an entry."""
    offline: bool = False
    world_size: int | None = None
    """Ranks of each entry; None: as it is configured."""

    @property
    def log(self) -> str:
        """Name of an entry's log."""
        return LOG if self.world_size is None else f"run_{self.world_size}_ranks.log"

    def words(self, layers: int | None) -> list[str]:
        """Return the options of an entry's run with so many layers, None: all."""
        words = ["--device", self.device]
        words += ["--layers", str(layers)] if layers is not None else []
        ranks = self.world_size
        return [*words, *(["--world-size", str(ranks)] if ranks is not None else [])]


@dataclass
class Runner:
    """Runs the entries of a root."""

    root: Path
    places: Places
    settings: RunSettings
    progress: Progress
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _processes: set[subprocess.Popen[bytes]] = field(default_factory=set, init=False)
    _source: str = field(default_factory=lambda: source_hash(), init=False)
    _known: Sequence[Result] = field(init=False)
    """The rows as they were when this run began."""

    def __post_init__(self) -> None:
        self._known = load_results(self.root)

    def todo(self, entries: Sequence[RegistryEntry]) -> list[RegistryEntry]:
        """Return the entries that are to be run."""
        results = load_results(self.root)
        return [entry for entry in entries if self._is_due(entry, results)]

    def run(self, entries: Sequence[RegistryEntry]) -> Iterator[tuple[Result, bool]]:
        """Yield each entry's row as it ends, and whether it ran now: a run beside this one may have
        had it done.
        """
        pool = ThreadPoolExecutor(max_workers=self.settings.jobs)
        try:
            futures = [pool.submit(self._one, entry) for entry in entries]
            for future in as_completed(futures):
                if (found := future.result()) is not None:
                    yield found
        finally:
            self._stopped.set()
            for process in list(self._processes):
                _end(process)
            pool.shutdown(cancel_futures=True)

    def _is_due(self, entry: RegistryEntry, results: Sequence[Result]) -> bool:
        row = self._row(entry, results)
        if self.settings.changed:
            return row is not None and row.key != self._key(entry)
        return (
            self.settings.fresh
            or row is None
            or row.status != "passed"
            or row.key != self._key(entry)
        )

    def _row(self, entry: RegistryEntry, results: Sequence[Result]) -> Result | None:
        told = self.settings
        return row_of(
            results, entry.name, told.device, reduced=told.reduced, world_size=told.world_size
        )

    def _key(self, entry: RegistryEntry) -> str:
        told, ranks = self.settings, self.settings.world_size
        return key_of(
            entry, self.root, self._source, told.device, reduced=told.reduced, world_size=ranks
        )

    def _one(self, entry: RegistryEntry) -> tuple[Result, bool] | None:
        """Run one entry, unless another run of the registry did since this one began; None when
        stopped.
        """
        folder = self.root / WORK / FOLDER / entry.config_id
        folder.mkdir(parents=True, exist_ok=True)
        with self._entry_lock(entry, folder):
            if self._stopped.is_set():
                return None
            row = self._row(entry, load_results(self.root))
            if (
                row is not None
                and row != self._row(entry, self._known)
                and row.key == self._key(entry)
            ):
                return row, False
            place = self.places.take(
                lambda why: self.progress.waiting(entry.name, why), self._stopped
            )
            if place is None:
                return None
            try:
                found = self._in_process(entry, folder, place)
            finally:
                place.leave()
        return None if found is None else (found, True)

    def _entry_lock(self, entry: RegistryEntry, folder: Path) -> _EntryLock:
        return _EntryLock(FileLock(folder / ".lock", thread_local=False), self, entry.name)

    def _in_process(self, entry: RegistryEntry, folder: Path, place: Place) -> Result | None:
        output, log, key, start = (
            folder / OUTPUT,
            folder / self.settings.log,
            self._key(entry),
            time.monotonic(),
        )
        output.unlink(missing_ok=True)
        command, layers = self._command(entry, output)
        with log.open("wb") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            self.progress.started(entry.name, log)
            code = self._wait(command, file, place)
        if self._stopped.is_set():
            return None
        found = _read(output, code)
        fields = {
            "layers": layers,
            "world_size": self.settings.world_size,
            "key": key,
            "seconds": time.monotonic() - start,
            "command": self._repeated(entry, layers),
        }
        fields |= {"log": log.relative_to(self.root).as_posix(), "device": self.settings.device}
        fields["model_file"] = registry.digest(model_file(entry, self.root))
        result = with_tests(
            result_of(entry.name, found, None, **fields), model_file(entry, self.root), self.root
        )
        keep(self.root, entry, result)
        return result

    def _command(self, entry: RegistryEntry, output: Path) -> tuple[list[str], int | None]:
        layers = reduced_layers(entry, self.root) if self.settings.reduced else None
        layers = 2 if self.settings.reduced and layers is None else layers
        words = [
            sys.executable,
            "-m",
            run_model.MODULE,
            "--entry",
            entry.name,
            "--root",
            str(self.root),
        ]
        words += ["--output", str(output), "--exit-with-parent"]
        return [*words, *self.settings.words(layers)], layers

    def _repeated(self, entry: RegistryEntry, layers: int | None) -> str:
        """Return the command that repeats an entry's run on any machine, from the root."""
        words = [
            "python",
            "-m",
            run_model.MODULE,
            "--entry",
            entry.name,
            "--root",
            ".",
            "--output",
            "run.json",
        ]
        return shlex.join([*words, *self.settings.words(layers)])

    def _wait(self, command: Sequence[str], log: Any, place: Place) -> int | None:
        """Return the process's exit code; None at its time limit. It ends with this process,
        however that ends.
        """
        own = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        own |= {"HF_HUB_OFFLINE": "1"} if self.settings.offline else {}
        environment = {**os.environ, **own, **place.environment}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self._processes.add(process)
        try:
            if self._stopped.is_set():  # between the two lines above
                _end(process)
            return process.wait(self.settings.seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return None
        finally:
            self._processes.discard(process)
            if process.stdin is not None:
                process.stdin.close()


@dataclass
class _EntryLock:
    """Held while an entry runs; another run that has it is waited for."""

    lock: FileLock
    runner: Runner
    name: str

    def __enter__(self) -> None:
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            self.runner.progress.waiting(self.name, "another run of the registry has it")
            self._wait()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def _wait(self) -> None:
        while not self.runner._stopped.is_set():
            try:
                self.lock.acquire(timeout=1)
            except Timeout:
                continue
            return


def keep(root: Path, entry: RegistryEntry, result: Result) -> None:
    """Write a row, and what follows from it to the matrix and, of a run of all layers as the entry
    is configured, to the entry.

    The row comes last: killed before that, the entry is run again, and nothing is left half told.
    """
    matrix = matrix_path(root)
    with registry.registry_lock(root):
        rows = with_result(load_results(root), result)
        text = matrix.read_text(encoding="utf-8") if matrix.exists() else empty_matrix()
        write_atomically(
            matrix, refreshed(text, entry, [row for row in rows if row.name == entry.name])
        )
        if result.layers is None and result.world_size is None:
            _keep_verdict(root, entry, result)
        write_atomically(results_path(root), text_of(rows))


def _keep_verdict(root: Path, entry: RegistryEntry, result: Result) -> None:
    path = registry.models_path(root)
    text = path.read_text(encoding="utf-8") if path.exists() else registry.HEADER
    verdict = {"status": result.status, "tested": result.date[:10], "model_file": result.model_file}
    fields = {key: value for key, value in verdict.items() if value}
    write_atomically(path, set_fields(insert_entry(text, entry), entry.name, fields))


def _read(output: Path, code: int | None) -> dict[str, Any]:
    """Return what the agent wrote, or what its end says."""
    if code is None:
        return {"status": "timeout", "error": "it was ended at its time limit"}
    if output.exists():
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found
    if code == -signal.SIGKILL:
        return {
            "status": "lost",
            "error": "the process was killed, most likely because memory ran out",
        }
    return {"status": "lost", "error": f"the process ended with code {code} and no result"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    except ProcessLookupError:
        return

"""Runs drawn inputs, and says what must not be: a traceback, a hang, a file written elsewhere, memory
beyond its limit.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from onboard.cli.terminal import one_line
from onboard.errors import OnboardError
from tests.fuzz.kinds import KINDS, Files, Kind
from tests.support.checkpoints import tree

SECONDS = 60
"""What an input may take; the machine may be busy."""
MORE_BYTES = 1 << 30
"""Address space that an input may take beside what the libraries do."""
MOST_LINES, MOST_LENGTH = 3, 2300
"""Of what is printed: the phase, its failure, and a wrapped path."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
)


class Writes:
    """Notes what Python opens for writing, makes, moves or removes outside of one folder."""

    def __init__(self) -> None:
        self.place: Path | None = None
        self.outside: list[str] = []
        sys.addaudithook(self._heard)

    def _heard(self, event: str, values: tuple[Any, ...]) -> None:
        if self.place is None:
            return
        paths: tuple[Any, ...] = ()
        if event == "open" and isinstance(values[2], int) and values[2] & _WRITES:
            paths = values[:1]
        elif event in _CHANGES:
            paths = values[:2] if event in ("os.rename", "os.link") else values[:1]
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn"):
            self.outside.append(f"{event} {values[:2]}")
        for path in paths:
            if isinstance(path, str | bytes | Path) and not self._inside(Path(os.fsdecode(path))):
                self.outside.append(f"{event} {path!r}")

    def _inside(self, path: Path) -> bool:
        full = Path(os.path.abspath(path))
        return self.place is None or full.is_relative_to(self.place) or full == Path("/dev/null")


WRITES = Writes()


def explore(name: str, count: int, number: int) -> Counter[str]:
    """Draw `count` inputs of a kind and return how many ended how; raise what must not be."""
    kind, ended = KINDS[name], Counter[str]()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    @given(kind.drawn())
    def one(files: Files) -> None:
        try:
            ended[outcome(kind, files)] += 1
        except BaseException:
            last.update(files=files)  # at the end, the least that hypothesis found
            raise

    last: dict[str, Files] = {}
    try:
        one()
    except BaseException:
        print(f"{name}: {keep(last.get('files', {}))} has the input", file=sys.stderr)
        raise
    return ended


def keep(files: Files) -> Path:
    """Write an input where it can be looked at."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-failure-"))
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def outcome(kind: Kind, files: Files) -> str:
    """Return what came of one input: accepted, or refused with which exit code."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        place = Path(folder).resolve()
        for path, data in files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(data)
        before = tree(place)
        with _watched(place):
            code, said = _asked(kind, place)
        check_words(code, said)
        if code:
            assert tree(place) == before, "a file was written though the input was refused"
        return "accepted" if code == 0 else f"refused ({code})"


def _asked(kind: Kind, place: Path) -> tuple[int, str]:
    """Return the exit code, and what was printed on either stream, by whichever library."""
    with _captured() as output:
        try:
            code = kind.ask(place)
        except OnboardError as error:
            code = error.exit_code
            print(f"onboard: {one_line(str(error))}", file=sys.stderr)  # as the command does
    return code, output[0]


def check_words(code: int, said: str) -> None:
    """Raise `AssertionError` unless a refusal is one line, with nothing that a terminal obeys."""
    lines = said.splitlines()
    assert code in (0, 1, 2, 3), f"exit code {code}"
    assert "internal error" not in said, said[-3000:]
    assert "Traceback" not in said, said[-3000:]
    assert len(lines) <= MOST_LINES, said[:3000]
    assert all(len(line) <= MOST_LENGTH for line in lines), max(map(len, lines))
    assert code == 0 or lines[-1].startswith("onboard: "), said[:3000]
    assert "\x1b" not in said


@contextmanager
def _watched(place: Path) -> Iterator[None]:
    """End the process at the deadline, wherever it is; raise when something was written outside."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    WRITES.outside.clear()
    WRITES.place = place
    try:
        with _environment(place):
            yield
    finally:
        WRITES.place = None
        faulthandler.cancel_dump_traceback_later()
    assert not WRITES.outside, f"outside of its folder: {WRITES.outside[:3]}"


@contextmanager
def _environment(place: Path) -> Iterator[None]:
    """Work beside the input, so that what is written by a relative name is seen."""
    folder = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(folder)


@contextmanager
def _captured() -> Iterator[list[str]]:
    """Yield a list that has, afterwards, what was printed, by the file descriptors."""
    output: list[str] = []
    place, WRITES.place = WRITES.place, None
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(number) for number in (1, 2)]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        old = sys.stdout, sys.stderr
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        WRITES.place = place
        try:
            yield output
        finally:
            WRITES.place = None
            sys.stdout.flush()
            sys.stdout, sys.stderr = old
            for number, stream in zip((1, 2), kept, strict=True):
                os.dup2(stream, number)
                os.close(stream)
            file.seek(0)
            output.append(file.read().decode("utf-8", "replace"))
            WRITES.place = place


def limit_memory() -> None:
    """Let this process take no more than `MORE_BYTES` beside what it has; Linux."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, used + MORE_BYTES))

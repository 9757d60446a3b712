"""`python -m MODULE` in processes forked from one that has done the imports: tests that start many
spare these.

Such a process differs from a new interpreter in nothing else: the one that it is forked from runs
nothing itself. What a run of `onboard` starts in turn, pytest and the run agent, comes from there
as well.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from onboard.workflow.processes import warm as programs
from onboard.workflow.processes.programs import in_new_interpreter, run_as_main

if TYPE_CHECKING:
    from onboard.workflow.phase import RunContext

_KEPT = ExitStack()
SERVE = "import sys; from tests.support.warm import serve; serve(sys.argv[1])"


@contextmanager
def started(**environment: str) -> Iterator[Warm]:
    """Yield the way to a process to fork from, which ends with the context; its imports find
    `environment` as well.
    """
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        address = Path(folder, "warm")
        command = [sys.executable, "-c", SERVE, str(address)]
        env = {**os.environ, **environment, "PYTHONPATH": path}
        with subprocess.Popen(command, env=env) as server:
            try:
                while not address.exists():
                    assert server.poll() is None, (
                        "the process that others are to be forked from did not start"
                    )
                    time.sleep(0.05)
                yield Warm(str(address), environment)
            finally:
                server.kill()


@cache
def shared(**environment: str) -> Warm:
    """Return the way to one that all tests of this process fork from, until `end`; those whose
    imports are to find something in their environment have one of their own.
    """
    return _KEPT.enter_context(started(**environment))


def end() -> None:
    """End the shared processes."""
    _KEPT.close()
    shared.cache_clear()


def run_program(text: str, *words: str | Path) -> str:
    """Run `python -c TEXT WORDS` in a process of its own, for this one must never have the code of a
    model imported; return what it prints.
    """
    done = shared()("tests.support.program", text, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class Warm:
    """Where the process listens that others are forked from, and what its environment has besides."""

    def __init__(self, address: str, added: Mapping[str, str] | None = None) -> None:
        self.address = address
        self.added = added or {}

    def __call__(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `python -m WORDS` to its end."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = self._start(words, out, err).wait()
            return subprocess.CompletedProcess(words, code, _text(out), _text(err))

    @contextmanager
    def started(
        self, *words: str | Path, errors: IO[Any] | None = None
    ) -> Iterator[tuple[Forked, IO[str]]]:
        """Begin `python -m WORDS`, which has ended where the context does; yield it, and what it
        prints. What it says of errors goes to the file `errors`, if there is one.
        """
        reading, writing = os.pipe()
        with (
            os.fdopen(reading) as printed,
            os.fdopen(writing, "w") as out,
            tempfile.TemporaryFile() as nowhere,
        ):
            forked = self._start(words, out, errors or nowhere)
            out.close()
            yield forked, printed
            forked.wait()

    def _start(self, words: Sequence[str | Path], out: IO[Any], err: IO[Any]) -> Forked:
        environment = {**os.environ, **self.added}
        return Forked(self.address, list(map(str, words)), os.getcwd(), environment, (out, err))

    def run_module(
        self,
        words: Sequence[str],
        output: IO[Any],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Do what `onboard.workflow.processes.programs.in_new_interpreter` does."""
        added = environment or {}
        assert "HF_HUB_OFFLINE" not in added, "the libraries have read the environment by now"
        place, told = str(folder or Path.cwd()), {**os.environ, **added}
        return Forked(self.address, words, place, told, (output, output)).wait()


class Forked:
    """A program that was begun, in a process whose parent is the one that it was forked from."""

    def __init__(
        self,
        address: str,
        words: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        streams: tuple[IO[Any], IO[Any]],
    ) -> None:
        # Its standard input, which is open as long as this process waits
        reading, self._writing = os.pipe()
        with os.fdopen(reading), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            socket.send_fds(connection, [b"."], [reading, *(each.fileno() for each in streams)])
            connection.sendall(json.dumps([list(words), folder, dict(environment)]).encode())
            connection.shutdown(socket.SHUT_WR)
            self._answer = connection.makefile()
        self.pid = int(self._answer.readline())
        self.code = 0

    def wait(self) -> int:
        """Return its exit code, or -1 where a signal ended it."""
        if not self._answer.closed:
            with self._answer, os.fdopen(self._writing, "w"):
                answer = self._answer.read()
            self.code = int(answer) if answer else -1
        return self.code


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def serve(address: str) -> None:
    """Fork for everyone who asks, as long as the process that started this one lives."""
    from onboard.workflow.sweep.worker import prepare

    prepare()
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        server.settimeout(1.0)
        os.rename(f"{address}.new", address)
        while os.getppid() == parent:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                _become(connection, Warm(address))
            connection.close()


def _become(connection: socket.socket, warm: Warm) -> NoReturn:
    """Be the process that was asked for: its streams, its folder, its environment, its module."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    words, folder, environment = json.loads(connection.makefile().read())
    code = 1
    try:
        connection.sendall(f"{os.getpid()}\n".encode())
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
        _start_others(warm)
        code = run_as_main(words)
    finally:
        connection.sendall(str(code).encode())
        os._exit(0)


def _start_others(warm: Warm) -> None:
    """Have the phases `test` and `run` start their processes as this one was started."""
    from onboard.workflow import phase_runner as engine

    open_run = engine.open_run

    def opened(*arguments: Any) -> RunContext:
        context = open_run(*arguments)
        context.run_module = warm.run_module
        return context

    engine.open_run = opened
    programs.NewServer = lambda module: Asked(lambda: warm)  # type: ignore[assignment, misc]


class Asked:
    """What `onboard.workflow.processes.warm.WarmPrograms` has programs forked from: not a process of
    its own, with all imports done once more, but the one that is there.
    """

    def __init__(self, warm: Callable[[], Warm] = shared) -> None:
        self._warm = warm

    def __call__(self, *given: Any, **named: Any) -> int:
        """Run a module; one that libraries are to be told something when they are imported has an
        interpreter of its own.
        """
        if "HF_HUB_OFFLINE" in named.get("environment", ()):
            return in_new_interpreter(*given, **named)
        return self._warm().run_module(*given, **named)

    def close(self) -> None:
        """Leave it to the others."""

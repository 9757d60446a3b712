"""`python -m MODULE` in processes forked from one that has done the imports: tests that start many spare these.

Such a process differs from a new interpreter in nothing else: the one that it is forked from runs nothing itself. What
a run of `onboard` starts in turn, pytest and the run agent, comes from there as well.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from onboard.workflow.phase import RunContext

SERVE = "import sys, warm; warm.serve(sys.argv[1])"


@contextmanager
def started() -> Iterator[Warm]:
    """Yield the way to a process to fork from, which ends with the context."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        address = Path(folder, "warm")
        command = [sys.executable, "-c", SERVE, str(address)]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as server:
            try:
                while not address.exists():
                    assert server.poll() is None, "the process that others are to be forked from did not start"
                    time.sleep(0.05)
                yield Warm(str(address))
            finally:
                server.kill()


class Warm:
    """Where the process listens that others are forked from."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __call__(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `python -m WORDS` to its end."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = self._run(list(map(str, words)), os.getcwd(), os.environ, out, err)
            return subprocess.CompletedProcess(words, code, _text(out), _text(err))

    def run_pytest(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
        """Do what `onboard.workflow.pytest_run.in_new_interpreter` does."""
        environment = {**os.environ, **environment, "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryFile() as out:
            self._run(["pytest", *arguments], str(folder), environment, out, out)
            return _text(out)

    def call(self, command: Sequence[str], log: IO[str], *, offline: bool) -> int:
        """Do what the run phase does to start its agent."""
        assert command[:2] == [sys.executable, "-m"]
        assert not offline, "the libraries have read the environment by now"
        return self._run(command[2:], os.getcwd(), os.environ, log, log)

    def _run(
        self, words: Sequence[str], folder: str, environment: Mapping[str, str], out: IO[Any], err: IO[Any]
    ) -> int:
        reading, writing = os.pipe()  # its standard input, which is open as long as this process lives
        with socket.socket(socket.AF_UNIX) as connection, os.fdopen(reading), os.fdopen(writing, "w"):
            connection.connect(self.address)
            socket.send_fds(connection, [b"."], [reading, out.fileno(), err.fileno()])
            connection.sendall(json.dumps([list(words), folder, dict(environment)]).encode())
            connection.shutdown(socket.SHUT_WR)
            answer = connection.makefile().read()
        return int(answer) if answer else -1


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def serve(address: str) -> None:
    """Fork for everyone who asks, as long as the process that started this one lives."""
    from onboard.workflow.sweep import worker

    worker._import_all()
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
    code: object = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
        _start_others(warm)
        sys.argv[1:] = words[1:]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(str(code if isinstance(code, int) else 1).encode())
        os._exit(0)


def _start_others(warm: Warm) -> None:
    """Have the phases `test` and `run` start their processes as this one was started."""
    from onboard.workflow import engine
    from onboard.workflow.phases import run

    open_run = engine.open_run

    def opened(*arguments: Any) -> RunContext:
        context = open_run(*arguments)
        context.run_pytest = warm.run_pytest
        return context

    engine.open_run, run._call = opened, warm.call

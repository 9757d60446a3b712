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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from onboard.workflow.phase import RunContext

SERVE = "import sys, warm; warm.serve(sys.argv[1])"


class Warm:
    """The process that is forked from, started when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.address, self._server = str(folder / "warm"), None

    def __call__(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `python -m WORDS` to its end."""
        if self._server is None:
            self._server = self._start()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = _ask(self.address, list(map(str, words)), os.getcwd(), os.environ, out, err)
            texts = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
        return subprocess.CompletedProcess(words, code, *texts)

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        server = subprocess.Popen([sys.executable, "-c", SERVE, self.address], env={**os.environ, "PYTHONPATH": path})
        while not Path(self.address).exists():
            assert server.poll() is None, "the process that others are to be forked from did not start"
            time.sleep(0.05)
        return server

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()


def _ask(
    address: str, words: Sequence[str], folder: str, environment: Mapping[str, str], out: IO[Any], err: IO[Any]
) -> int:
    """Have `python -m WORDS` run; return its exit code."""
    reading, writing = os.pipe()  # its standard input, which is open as long as this process lives
    with socket.socket(socket.AF_UNIX) as connection, os.fdopen(reading), os.fdopen(writing, "w"):
        connection.connect(address)
        socket.send_fds(connection, [b"."], [reading, out.fileno(), err.fileno()])
        connection.sendall(json.dumps([list(words), folder, dict(environment)]).encode())
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile().read()
    return int(answer) if answer else -1


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
                _run(address, connection)
            connection.close()


def _run(address: str, connection: socket.socket) -> NoReturn:
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
        _start_others_here(address)
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


def _start_others_here(address: str) -> None:
    """Have the phases `test` and `run` start their processes as this one was started."""
    from onboard.workflow import engine
    from onboard.workflow.phases import run

    open_run = engine.open_run

    def run_pytest(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
        environment = {**os.environ, **environment, "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryFile() as out:
            _ask(address, ["pytest", *arguments], str(folder), environment, out, out)
            out.seek(0)
            return out.read().decode()

    def call(command: Sequence[str], log: IO[str], *, offline: bool) -> int:
        return _ask(address, command[2:], os.getcwd(), os.environ, log, log)

    def opened(*arguments: Any) -> RunContext:
        context = open_run(*arguments)
        context.run_pytest = run_pytest
        return context

    engine.open_run, run._call = opened, call

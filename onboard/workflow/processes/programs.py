"""How phases start Python programs, `python -m MODULE`: in a new interpreter, or forked from a
process that has its imports done.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Protocol

from onboard.workflow.processes.orphans import die_with

STARTED = "onboard.workflow.processes.started"
NOTHING: Mapping[str, str] = MappingProxyType({})
"""An environment to which nothing is added."""
Ends = tuple[Connection, Connection]
"""Of a pipe that goes both ways."""


class RunModule(Protocol):
    """Runs a module as a program, to its end."""

    def __call__(
        self,
        words: Sequence[str],
        output: IO[Any],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] = NOTHING,
    ) -> int:
        """Run `python -m WORDS`; return its exit code (negative: the signal that ended it).

        Args:
            words: the module and its arguments.
            output: gets what it prints, on either stream.
            folder: where it works; None: here.
            environment: what is added to this process's.

        Its standard input says nothing, and ends with this process.
        """


def in_new_interpreter(
    words: Sequence[str],
    output: IO[Any],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] = NOTHING,
) -> int:
    """Do so in a new interpreter: see `RunModule`."""
    with subprocess.Popen(
        [sys.executable, "-m", STARTED, str(os.getpid()), *words],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            return process.wait()
        except BaseException:
            process.kill()
            raise


class _Server:
    """The process at the other end of a connection, which forks for each module that it is to
    run.
    """

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection, self._pid = connection, pid

    def __call__(
        self,
        words: Sequence[str],
        output: IO[Any],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] = NOTHING,
    ) -> int:
        """Run a module in a process of its own."""
        reading, writing = os.pipe()
        try:
            self._connection.send((list(words), str(folder or Path.cwd()), dict(environment)))
            for stream in (reading, output.fileno()):
                send_handle(self._connection, stream, self._pid)
            return int(self._connection.recv())
        except BaseException:  # an interrupt: what it started ends with it
            os.kill(self._pid, signal.SIGKILL)
            raise
        finally:
            os.close(reading)
            os.close(writing)


class ForkServer(_Server):
    """A process forked now, which forks one more for each module that it is to run, later: see
    `RunModule`.

    These have this process's imports and nothing of what it does after, and spare the seconds that
    importing the libraries takes. Make it while the process has one thread and no CUDA context.
    """

    def __init__(
        self,
        ends: Ends | None = None,
        without: Sequence[int] = (),
        first: Callable[[], None] | None = None,
    ) -> None:
        """`ends` are those of a pipe, where no more can be made by now; the programs are `without`
        these of the process's descriptors; the new process calls `first` before it serves.
        """
        connection, other = ends or Pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                die_with(parent)
                connection.close()
                for descriptor in without:
                    os.close(descriptor)
                if first is not None:
                    first()
                serve(other)
            finally:  # never on with what this process was at
                os._exit(1)
        other.close()
        super().__init__(connection, pid)

    def close(self) -> None:
        """End the process, whatever it is at."""
        self._connection.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class NewServer(_Server):
    """A new process that runs `python -m MODULE FD`, which is to `serve` the connection of that
    number.
    """

    def __init__(self, module: str) -> None:
        connection, other = Pipe()
        end, nothing = other.fileno(), subprocess.DEVNULL
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(end)],
            pass_fds=[end],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
        )
        other.close()
        super().__init__(connection, self._process.pid)

    def close(self) -> None:
        """End the process, whatever it is at."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def serve(connection: Connection) -> None:
    """Fork for every request, and leave this process without going back to whoever forked it."""
    code = 1
    try:
        while True:
            request = connection.recv()
            streams = [recv_handle(connection) for _ in range(2)]
            connection.send(_run_apart(request, streams))
    except EOFError:  # nothing more to do
        code = 0
    finally:
        os._exit(code)


def _run_apart(request: tuple[list[str], str, dict[str, str]], streams: list[int]) -> int:
    """Run a module in a fork of this process; return its exit code."""
    server, child = os.getpid(), os.fork()
    if child == 0:
        code = 1
        try:
            die_with(server)
            # An interrupt is the program's, not the server's
            if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            code = _become(*request, *streams)
        finally:
            os._exit(code)
    for stream in streams:
        os.close(stream)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(
    words: list[str], folder: str, environment: dict[str, str], source: int, output: int
) -> int:
    """Be what a new interpreter would be, with the imports done."""
    for stream, number in ((source, 0), (output, 1), (output, 2)):
        os.dup2(stream, number)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ.update(environment)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    return run_as_main(words)


def run_as_main(words: Sequence[str]) -> int:
    """Run `python -m WORDS` in this process; return the exit code that it would end with."""
    code: object = 1
    sys.argv[1:] = words[1:]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code if isinstance(code, int) else 1

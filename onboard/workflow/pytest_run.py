"""How the test phase runs pytest: in a new interpreter, or in a process forked from one that has its imports done."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from onboard.workflow.orphans import die_with

RunPytest = Callable[[Sequence[str], Path, Mapping[str, str]], str]
"""(arguments of pytest, working folder, additions to the environment) -> everything that it printed."""


def in_new_interpreter(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run `python -m pytest`."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env={**os.environ, **environment, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return process.stdout


class ForkedPytest:
    """A process forked now, which runs pytest once, later: it has this one's imports, and nothing of what comes after.

    Spares the seconds that importing the libraries takes. Make it while the process has one thread and no CUDA context.
    """

    def __init__(self) -> None:
        self._connection, other = Pipe()
        parent, self._pid = os.getpid(), os.fork()
        if self._pid == 0:
            die_with(parent)
            self._connection.close()
            _serve(other)
        other.close()

    def __call__(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
        """Run pytest there; a process that dies on the way leaves what it had printed."""
        with tempfile.NamedTemporaryFile() as output:
            self._connection.send((list(arguments), str(folder), dict(environment), output.name))
            self.close()
            return Path(output.name).read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Wait for the process; one that was given nothing to do ends at once."""
        self._connection.close()
        os.waitpid(self._pid, 0)


def _serve(connection: Connection) -> None:
    """Run the one request that comes, and leave this process without going back to whoever forked it."""
    code = 1
    try:
        arguments, folder, environment, output = connection.recv()
        code = _run(arguments, folder, environment, output)
    except EOFError:  # nothing to do
        code = 0
    finally:
        os._exit(code)


def _run(arguments: list[str], folder: str, environment: dict[str, str], output: str) -> int:
    import pytest

    os.chdir(folder)
    os.environ.update(environment)
    sys.dont_write_bytecode = True
    with open(output, "w", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    return code

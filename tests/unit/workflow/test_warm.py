"""Programs that start from a process with the libraries imported, and what becomes of them without
it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from onboard.workflow.processes.warm import WarmPrograms

PROGRAM = (
    "import os, sys, signal; "
    "print('torch' in sys.modules, os.getppid(), signal.getsignal(signal.SIGINT).__name__)"
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "asked.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path / "output"


def _asked(programs: WarmPrograms, path: Path) -> list[str]:
    with path.open("w") as output:
        assert programs(["asked"], output) == 0
    return path.read_text().split()


def test_programs_have_the_libraries_and_can_be_interrupted(program: Path) -> None:
    programs = WarmPrograms()
    programs.start()
    programs.start()
    first, second = _asked(programs, program), _asked(programs, program)
    assert first == second == ["True", first[1], "default_int_handler"]
    assert first[1] != str(os.getpid())
    programs.close()


def test_without_a_process_or_when_it_has_died_they_start_by_themselves(program: Path) -> None:
    programs = WarmPrograms()
    assert _asked(programs, program) == ["False", str(os.getpid()), "default_int_handler"]
    programs.start()
    assert programs._server is not None
    os.kill(programs._server._pid, signal.SIGKILL)
    time.sleep(0.1)
    assert _asked(programs, program) == ["False", str(os.getpid()), "default_int_handler"]
    programs.close()


def test_a_process_that_is_not_asked_ends(program: Path) -> None:
    programs = WarmPrograms()
    programs.start()
    process = programs._server._process  # type: ignore[union-attr]
    programs.close()
    assert process.returncode == -signal.SIGKILL

"""Programs that start from a process with the libraries imported, and what becomes of them without
it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


ALONE = """
import sys, threading, types
from onboard.workflow.processes import warm

if sys.argv[2] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[2] == "torch":
    sys.modules["torch"] = types.ModuleType("torch")
warm._LIBRARIES = ("wave",)
if sys.argv[2] != "broken":
    warm.import_all = lambda: sys.modules.__setitem__("rest", sys)
else:
    warm.import_all = sys.exit
warm.NewServer = lambda module: print("new", module)
programs = warm.WarmPrograms()
try:
    programs.start()
except SystemExit:
    open(sys.argv[1] + ".went_on", "w").close()
if programs._server is not None:
    with open(sys.argv[1], "w") as output:
        print(programs(["asked"], output), programs._server and programs._server._pid)
    programs.close()
"""
"""Starts a program from a process that has one library, which takes no time to import."""
INHERITED = (
    "import os, sys, signal; "
    "print('wave' in sys.modules, 'rest' in sys.modules, os.getppid(), signal.getsignal(signal.SIGINT).__name__)"
)


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


def test_it_is_forked_from_one_that_does_nothing_else_yet(program: Path) -> None:
    """Which spares it the imports."""
    program.with_name("asked.py").write_text(INHERITED)
    printed = _alone(program, "nothing")
    assert program.read_text().split() == ["True", "True", printed[1], "default_int_handler"]
    assert printed[0] == "0"


def test_without_the_rest_of_the_libraries_it_has_an_interpreter_of_its_own(program: Path) -> None:
    """The process that could not import them does nothing else, either."""
    program.with_name("asked.py").write_text(INHERITED)
    assert _alone(program, "broken") == ["0", "None"]
    assert program.read_text().split()[:2] == ["False", "False"]
    assert not program.with_name(f"{program.name}.went_on").exists()


@pytest.mark.parametrize("has", ["threads", "torch"])
def test_it_is_new_beside_threads_and_what_may_have_asked_for_gpus(has: str, program: Path) -> None:
    assert _alone(program, has) == ["new", "onboard.workflow.processes.warm"]


def _alone(program: Path, has: str) -> list[str]:
    words = [sys.executable, "-c", ALONE, str(program), has]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()

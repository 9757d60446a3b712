"""A program that a phase started does not outlive the process that started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import sys
from onboard.workflow.processes.programs import in_new_interpreter
with open(sys.argv[1], "w") as output:
    in_new_interpreter(["endless"], output)
"""
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(condition: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def test_a_killed_run_leaves_no_program(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(CHILD)
    output = tmp_path / "output"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(output)], env=os.environ | {"PYTHONPATH": path}
    )
    until(lambda: output.exists() and output.read_text().endswith("\n"))
    child = int(output.read_text())
    assert is_alive(child)
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        until(lambda: not is_alive(child), 5)
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)

"""`onboard sweep --executor ray` on a real cluster: what dies costs one target, and in the end
nothing is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onboard.workflow.sweep.target_record import TargetRecord

# Prints the process of each actor when it has been given its job.
TWO_JOBS = """
from pathlib import Path
from onboard.workflow.sweep import ray_executor
from onboard.workflow.sweep.job import Job
from onboard.workflow.sweep.ray_executor import RayExecutor
from onboard.workflow.sweep.inputs.targets import Target

class Slot(ray_executor.Slot):
    def do(self, text):
        import os, pathlib
        job = Job.model_validate_json(text)
        pathlib.Path({folder!r}, job.target.name + ".pid").write_text(str(os.getpid()))
        return super().do(text)

ray_executor.Slot = Slot
jobs = [Job(target=Target(name=name), folder=Path({folder!r}) / name, gibibytes=4) for name in ("llama", "gpt2")]
for job, record in RayExecutor("local", 1, False).run(jobs, lambda job: None):
    print(record.model_dump_json(), flush=True)
"""


def descendants(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True
    ).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()[1:]]
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in pairs if its_parent == parent]
    return found[1:]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(path: Path) -> str:
    end = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.05)
    return path.read_text()


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = TWO_JOBS.format(folder=str(tmp_path))
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.exhaustive
def test_a_lost_actor_costs_one_target_and_an_interrupt_leaves_nothing(
    sweep: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert sweep.stdout is not None
    os.kill(int(wait_for(tmp_path / "llama.pid")), signal.SIGKILL)
    record = TargetRecord.model_validate_json(sweep.stdout.readline())
    assert (record.target.name, record.end) == ("llama", "lost")
    assert "its Ray slot was lost: " in record.detail

    actor = int(wait_for(tmp_path / "gpt2.pid"))  # the next one has a slot again
    while not (workers := descendants(actor)):
        time.sleep(0.05)
    everything = {sweep.pid, *descendants(sweep.pid), *workers}
    os.killpg(sweep.pid, signal.SIGINT)
    _, said = sweep.communicate(timeout=60)
    assert said.endswith("KeyboardInterrupt\n"), said
    time.sleep(0.5)
    assert not [pid for pid in everything if alive(pid)]

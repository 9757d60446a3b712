"""A target's process may hang, die or eat all memory: it is bounded, and what it did is known."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path

import pytest

from onboard.workflow.processes.programs import ForkServer
from onboard.workflow.processes.pytest_run import run_pytest
from onboard.workflow.sweep import worker
from onboard.workflow.sweep.executors import LocalExecutor
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.job import EVENTS, VERDICT, Job, _limit_memory
from onboard.workflow.sweep.target_record import TargetRecord
from onboard.workflow.sweep.verdict import Verdict

Do = Callable[[Callable[[Job], None]], TargetRecord]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(target=Target(name="llama"), folder=tmp_path / "llama", seconds=20, gibibytes=2)


@pytest.fixture
def do(job: Job, monkeypatch: pytest.MonkeyPatch) -> Do:
    """Run a job whose child does what the test wants."""

    def run(work: Callable[[Job], None]) -> TargetRecord:
        monkeypatch.setattr(worker, "run_child", work)
        return worker.do(job)

    return run


def write_events(job: Job, *events: dict[str, object]) -> None:
    text = "".join(json.dumps(event) + "\n" for event in events)
    # As a kill in the middle of a line leaves it
    (job.folder / EVENTS).write_text(text + '{"step": "cut')


def leave_passed_tests(job: Job) -> None:
    """Leave what a target leaves whose tests passed."""
    phase = {
        "name": "test",
        "status": "done",
        "seconds": 0.1,
        "error": "",
        "proving": False,
        "internal": False,
    }
    write_events(job, {"phase": phase}, {"exit_code": 0}, {"end": True})


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_time_limit_ends_the_child_and_what_it_started(do: Do, job: Job) -> None:
    job.seconds = 1

    def hang(job: Job) -> None:
        write_events(job, {"step": "generate"})
        process = subprocess.Popen(["sleep", "60"])
        (job.folder / "pid").write_text(str(process.pid))
        time.sleep(60)

    started = time.monotonic()
    record = do(hang)
    assert time.monotonic() - started < 10
    assert (record.end, record.step) == ("timeout", "generate")
    time.sleep(0.2)
    assert gone(int((job.folder / "pid").read_text()))


def test_a_signal_is_named(do: Do) -> None:
    def die(job: Job) -> None:
        write_events(job, {"step": "test"})
        os.kill(os.getpid(), signal.SIGKILL)

    record = do(die)
    assert (record.end, record.step, record.detail) == ("killed", "test", "SIGKILL")


def test_memory_is_bounded(do: Do, job: Job) -> None:
    def eat(job: Job) -> None:
        _limit_memory(job.gibibytes)
        eaten = bytearray(int((job.gibibytes + 1) * 2**30))
        raise AssertionError(f"{len(eaten)} bytes were there")

    record = do(eat)
    assert (record.end, record.detail) == ("lost", "MemoryError")


@pytest.mark.parametrize("code", [0, 7])
def test_a_child_that_leaves_without_a_word_is_lost(do: Do, code: int) -> None:
    record = do(lambda job: os._exit(code))
    assert record.end == "lost"


def test_a_child_that_said_everything_is_done(do: Do) -> None:
    made = {
        "architecture": "X",
        "is_causal": False,
        "why_not_causal": "it looks ahead",
        "options": ["a"],
    }
    made |= {"refused": {"b": "c"}, "missing": [], "flow": 0.5}
    phase = {
        "name": "gather",
        "status": "done",
        "seconds": 0.1,
        "error": "",
        "proving": False,
        "internal": False,
    }
    record = do(
        lambda job: write_events(
            job, {"checkpoint": made}, {"phase": phase}, {"lines": 7}, {"end": True}
        )
    )
    assert (record.end, record.architecture, record.options, record.lines) == (
        "exited",
        "X",
        ["a"],
        7,
    )
    assert (record.is_causal, record.why_not_causal, record.flow) == (False, "it looks ahead", 0.5)
    assert [phase.name for phase in record.phases] == ["gather"]
    assert record.verdict is None  # there is nothing to judge


@pytest.mark.parametrize("judged", [True, False])
def test_the_judge_has_a_process_of_its_own(
    judged: bool, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(job: Job) -> None:
        (job.folder / "pid").write_text(str(os.getpid()))
        leave_passed_tests(job)

    def judge(job: Job) -> None:
        assert (job.folder / "pid").read_text() != str(os.getpid())
        if not judged:
            raise RuntimeError("this judge dies")
        (job.folder / VERDICT).write_text(Verdict(seed=os.getppid(), error="x").model_dump_json())

    monkeypatch.setattr(worker, "run_judge", judge)
    record = do(work)
    assert (record.end, record.exit_code) == ("exited", 0)
    assert record.verdict is not None
    assert record.verdict.seed == (os.getpid() if judged else None)
    last_words = "the judge ended without a word: RuntimeError: this judge dies"
    assert record.verdict.error == ("x" if judged else last_words)


def test_nothing_of_an_earlier_run_is_taken(do: Do, job: Job) -> None:
    job.folder.mkdir()
    write_events(job, {"end": True})
    assert do(lambda job: None).end == "lost"


def test_a_worker_that_dies_costs_one_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module that ends every interpreter at its start
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)\n")
    jobs = [Job(target=Target(name=name), folder=tmp_path / name) for name in ("llama", "gpt2")]
    found = list(LocalExecutor(1).run(jobs, lambda job: None))
    assert [job.target.name for job, _ in found] == ["llama", "gpt2"]
    assert {(record.end, record.detail) for _, record in found} == {("lost", "its worker died")}


def test_a_fork_is_given_folder_and_environment(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib\n"
        "def test_it():\n"
        f"    assert pathlib.Path.cwd() == pathlib.Path({str(tmp_path)!r})\n"
        "    assert os.environ['ONBOARD_SEED'] == '5'\n"
    )
    before = Path.cwd()
    server = ForkServer()
    arguments = ["-p", "no:cacheprovider", "test_it.py"]
    for _ in range(2):  # each request has a process of its own
        assert "1 passed" in run_pytest(arguments, tmp_path, {"ONBOARD_SEED": "5"}, server)
    server.close()
    assert Path.cwd() == before
    assert not (tmp_path / "__pycache__").exists()


def test_a_fork_that_dies_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import os\ndef test_it():\n    os.kill(os.getpid(), 9)\n")
    assert "passed" not in run_pytest(
        ["-p", "no:cacheprovider", "test_it.py"], tmp_path, {}, ForkServer()
    )


def test_nothing_of_one_program_is_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text("import json, sys; json.left = 1; sys.exit(int(sys.argv[1]))")
    (tmp_path / "two.py").write_text(
        "import json, os; print(hasattr(json, 'left'), os.environ.get('GIVEN'))"
    )
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer()
    with (tmp_path / "output").open("w") as output:
        assert server(["one", "7"], output, environment={"GIVEN": "1"}) == 7
        assert server(["two"], output) == 0
    assert (tmp_path / "output").read_text() == "False None\n"


def test_a_fork_works_by_a_pipe_from_before_and_without_what_is_kept_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "three.py").write_text("print('there')")
    monkeypatch.syspath_prepend(tmp_path)
    ends, (reading, writing) = Pipe(), os.pipe()
    server = ForkServer(ends, [writing])
    with (tmp_path / "output").open("w") as output:
        assert server(["three"], output) == 0
    assert (tmp_path / "output").read_text() == "there\n"
    os.close(writing)
    assert select.select([reading], [], [], 5)[0]  # its end: nobody else can write
    os.close(reading)
    server.close()


def test_a_server_without_work_ends() -> None:
    ForkServer().close()


# The signal comes while a finalizer runs, where Python drops whatever a handler raises.
ENDED_IN_A_FINALIZER = """
import os, signal, sys, time
from onboard.workflow.sweep import worker
from onboard.workflow.sweep.job import Job

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

def run(job):
    (job.folder / "pid").write_text(str(os.getpid()))
    time.sleep(60)

def wait(*_):
    path = job.folder / "pid"
    while not (path.exists() and path.read_text()):
        time.sleep(0.01)
    Finalized()
    time.sleep(60)

job = Job.model_validate_json({job!r})
worker.run_child, worker.prepare, worker.wait = run, lambda: None, wait
worker.serve()
"""


def test_what_ends_a_worker_ends_its_child_wherever_it_is(job: Job) -> None:
    script = ENDED_IN_A_FINALIZER.format(job=job.model_dump_json())
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=job.model_dump_json() + "\n",
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - started < 30
    time.sleep(0.2)
    assert gone(int((job.folder / "pid").read_text()))

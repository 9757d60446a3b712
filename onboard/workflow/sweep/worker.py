"""A process that has imported everything once, and forks a child for each job.

`python -m onboard.workflow.sweep.worker`: jobs come as lines of JSON on stdin, records go as lines
of JSON to stdout.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onboard.workflow.processes.orphans import die_with
from onboard.workflow.processes.warm import import_all
from onboard.workflow.sweep.job import EVENTS, LOG, VERDICT, Job, run_child, run_judge
from onboard.workflow.sweep.target_record import TargetRecord
from onboard.workflow.sweep.verdict import Verdict

_POLL = 0.05
_ENDING = (signal.SIGTERM, signal.SIGINT)
_children: set[int] = set()
"""The child that is running: what ends the worker ends it, too."""


def serve() -> None:
    """Do the jobs on stdin until it ends."""
    for number in _ENDING:
        signal.signal(number, _end)
    prepare()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    for line in sys.stdin:
        record = do(Job.model_validate_json(line))
        answers.write(record.model_dump_json() + "\n")


def _end(*_: object) -> None:
    """End with the child, at once: an exception that is raised while a finalizer runs would be
    dropped.
    """
    for child in _children:
        _kill_group(child)
    os._exit(1)


def prepare() -> None:
    """Import what children need; keep them to one core, since each has its worker, and from looking
    for garbage.
    """
    import_all("onboard.workflow.sweep.inputs.tiny_checkpoint", "onboard.workflow.sweep.judge")
    import torch

    torch.set_num_threads(1)
    gc.set_threshold(50_000, 20, 50)


def do(job: Job) -> TargetRecord:
    """Run a job in a child of its own, and its judge in another; return what is known of it,
    however they ended.
    """
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    started, used = time.monotonic(), _cpu_seconds()
    record = _onboarded(job, started + job.seconds)
    if _has_proven_files(record):
        before = time.monotonic()
        record.verdict = _judged(job, started + job.seconds)
        record.judge_seconds = time.monotonic() - before
    record.seconds, record.cpu_seconds = time.monotonic() - started, _cpu_seconds() - used
    return record


def _onboarded(job: Job, deadline: float) -> TargetRecord:
    """Have the target onboarded; return what is known of it."""
    started = time.monotonic()
    code = _wait(_fork(job, run_child), deadline)
    record = read_record(job)
    record.seconds = time.monotonic() - started
    if code is None:
        record.end = "timeout"
    elif code < 0:
        record.end, record.detail = "killed", signal.Signals(-code).name
    elif code > 0 or not record_is_complete(job):
        record.end, record.detail = "lost", _last_line(job.folder / LOG)
    return record


def _has_proven_files(record: TargetRecord) -> bool:
    """Whether there is a model file whose tests passed: worth a judgement, whatever came after
    them.
    """
    return any((phase.name, phase.status) == ("test", "done") for phase in record.phases)


def _judged(job: Job, deadline: float) -> Verdict:
    """Have what was left judged."""
    code = _wait(_fork(job, run_judge), deadline)
    path = job.folder / VERDICT
    if code == 0 and path.exists():
        return Verdict.model_validate_json(path.read_text(encoding="utf-8"))
    end = (
        "at its time limit"
        if code is None
        else signal.Signals(-code).name
        if code < 0
        else _last_line(job.folder / LOG)
    )
    return Verdict(error=f"the judge ended without a word: {end}")


def _cpu_seconds() -> float:
    """Return the seconds of a core that the children of this process, and theirs, have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _fork(job: Job, work: Callable[[Job], None]) -> int:
    """Start the child in a process group of its own, which what it starts is in as well."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # no child that `_children` does not know of
    parent, child = os.getpid(), os.fork()
    if child:
        _children.add(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        return child
    code = 1
    try:
        os.setsid()
        die_with(parent)
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        log = os.open(job.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, stream in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, stream)
        work(job)
        code = 0
    except BaseException:  # the worker's code must not go on in here
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _wait(child: int, deadline: float) -> int | None:
    """Return the child's exit code (negative: the signal), or None when the time was over; its
    group ends with it.

    Without the process that wants the answer this one ends as well.
    """
    code, parent = None, os.getppid()
    while code is None and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(_POLL)
        if os.getppid() != parent:
            _end()
    if code is None:
        _kill_group(child)
        os.waitpid(child, 0)
    _children.discard(child)
    return code


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its group yet
        os.kill(leader, signal.SIGKILL)


def _events(job: Job) -> list[dict[str, Any]]:
    path = job.folder / EVENTS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be cut


def record_is_complete(job: Job) -> bool:
    """Whether the child said all that it had to say."""
    return any(event.get("end") for event in _events(job))


def read_record(job: Job) -> TargetRecord:
    """Put a child's events together."""
    record = TargetRecord(target=job.target, mode=job.mode)
    for event in _events(job):
        if made := event.pop("checkpoint", None):
            record.architecture, record.is_causal = made["architecture"], made["is_causal"]
            record.why_not_causal = made["why_not_causal"]
            record.options, record.refused_options = made["options"], made["refused"]
            record.missing, record.flow = made["missing"], made["flow"]
        if phase := event.pop("phase", None):
            record.phases = [*record.phases, phase]
        for name in event.keys() & {"step", "error", "lines", "tests", "notes", "exit_code"}:
            setattr(record, name, event[name])
    return record


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


if __name__ == "__main__":
    serve()

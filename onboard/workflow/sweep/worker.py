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
from pathlib import Path
from typing import Any

from onboard.workflow.phases import PHASES
from onboard.workflow.processes.warm import import_all
from onboard.workflow.sweep.children import ENDING, end_all, fork, wait
from onboard.workflow.sweep.job import EVENTS, LOG, Job, read_verdict, run_child, run_judge
from onboard.workflow.sweep.kept_judge import KeptJudge
from onboard.workflow.sweep.target_record import TargetRecord
from onboard.workflow.sweep.verdict import Verdict

_kept_judge = KeptJudge()


def serve() -> None:
    """Do the jobs on stdin until it ends."""
    for number in ENDING:
        signal.signal(number, end_all)
    prepare()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    for line in sys.stdin:
        record = do(Job.model_validate_json(line))
        answers.write(record.model_dump_json() + "\n")
    _kept_judge.close()


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
    if _is_to_be_judged(job, record):
        before = time.monotonic()
        record.verdict = _judged(job, started + job.seconds)
        record.judge_seconds = time.monotonic() - before
        if record.verdict is None:
            record.end, record.step = "timeout", "the judge"
    record.seconds, record.cpu_seconds = time.monotonic() - started, _cpu_seconds() - used
    return record


def _onboarded(job: Job, deadline: float) -> TargetRecord:
    """Have the target onboarded; return what is known of it."""
    started = time.monotonic()
    code = wait(fork(job, run_child), deadline)
    record = read_record(job)
    record.seconds = time.monotonic() - started
    if code is None:
        record.end = "timeout"
    elif code < 0:
        record.end, record.detail = "killed", signal.Signals(-code).name
    elif code > 0 or not record_is_complete(job):
        record.end, record.detail = "lost", _last_line(job.folder / LOG)
    return record


def _is_to_be_judged(job: Job, record: TargetRecord) -> bool:
    """Whether there is a model file that is proven, and whose tests passed if they were asked for,
    whatever came after them.
    """
    last = min(job.until, "test", key=PHASES.index)
    return any((phase.name, phase.status) == (last, "done") for phase in record.phases)


def _judged(job: Job, deadline: float) -> Verdict | None:
    """Have what was left judged; None: the time was over."""
    if job.world_size == 1:
        code = wait(fork(job, run_judge), deadline)
    else:
        code = _kept_judge.run(job, deadline)
    if code is None:
        return None
    if code == 0 and (verdict := read_verdict(job)) is not None:
        return verdict
    last = signal.Signals(-code).name if code < 0 else _last_line(job.folder / LOG)
    return Verdict(error=f"the judge ended without a word: {last}")


def _cpu_seconds() -> float:
    """Return the seconds of a core that the children of this process, and theirs, have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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

"""A judge on several ranks goes on with the next target, and no target pays for another one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from onboard.runtime.ranks import leading
from onboard.workflow.sweep import kept_judge
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.job import VERDICT, Job, read_verdict
from onboard.workflow.sweep.kept_judge import KeptJudge
from onboard.workflow.sweep.verdict import Verdict

Judge = Callable[[Job], None]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptJudge]:
    """The process without ranks: who it is and when it ends is asked here."""
    monkeypatch.setattr(leading, "kept_workers", lambda *_: nullcontext())
    judge = KeptJudge()
    yield judge
    judge.close()


@pytest.fixture
def judges(monkeypatch: pytest.MonkeyPatch) -> Callable[[Judge], None]:
    return lambda judge: monkeypatch.setattr(kept_judge, "run_judge", judge)


def job_of(folder: Path, name: str, **values: object) -> Job:
    (folder / name).mkdir()
    own = {"folder": folder / name, "world_size": 2, "gibibytes": 64.0} | values
    return Job.model_validate({"target": Target(name=name), **own})


def say(job: Job, error: str = "") -> None:
    verdict = Verdict(seed=os.getpid(), error=error)
    (job.folder / VERDICT).write_text(verdict.model_dump_json())


def judged(kept: KeptJudge, job: Job, seconds: float = 30.0) -> tuple[int | None, Verdict]:
    code = kept.run(job, time.monotonic() + seconds)
    return code, read_verdict(job) or Verdict(error="nothing")


def test_one_process_judges_them_all(
    kept: KeptJudge, judges: Callable[[Judge], None], tmp_path: Path
) -> None:
    def judge(job: Job) -> None:
        os.write(1, f"of {job.target.name}\n".encode())
        say(job)

    judges(judge)
    jobs = [job_of(tmp_path, name) for name in ("llama", "gpt2", "opt")]
    found = [judged(kept, job) for job in jobs]
    assert [code for code, _ in found] == [0, 0, 0]
    [pid] = {verdict.seed for _, verdict in found}
    assert pid != os.getpid()
    for job in jobs:  # each has what was printed meanwhile
        assert (job.folder / "log.txt").read_text() == f"of {job.target.name}\n"
    _, other = judged(kept, job_of(tmp_path, "more", world_size=4))
    assert other.seed != pid


def test_what_ranks_cannot_divide_is_no_failure_of_the_judge(
    kept: KeptJudge, judges: Callable[[Judge], None], tmp_path: Path
) -> None:
    def judge(job: Job) -> None:
        verdict = Verdict(seed=os.getpid(), refused="" if job.target.name == "llama" else "3 heads")
        (job.folder / VERDICT).write_text(verdict.model_dump_json())

    judges(judge)
    found = [judged(kept, job_of(tmp_path, name)) for name in ("llama", "gpt2", "opt")]
    assert len({verdict.seed for _, verdict in found}) == 1
    assert [verdict.reason for _, verdict in found][1:] == ["3 heads", "3 heads"]


@pytest.mark.parametrize("how", ["error", "leaves", "dies"])
def test_what_an_earlier_target_did_to_the_judge_counts_for_no_other(
    how: str, kept: KeptJudge, judges: Callable[[Judge], None], tmp_path: Path
) -> None:
    before: list[str] = []

    def judge(job: Job) -> None:
        if before:
            if how == "leaves":
                os._exit(0)
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        say(job, "no memory is left" if before else "")
        before.append(job.target.name)

    judges(judge)
    (_, one), (code, two) = (judged(kept, job_of(tmp_path, name)) for name in ("llama", "gpt2"))
    assert (code, two.error) == (0, "")
    assert one.seed != two.seed


def test_an_error_of_a_new_judge_stays_and_ends_it(
    kept: KeptJudge, judges: Callable[[Judge], None], tmp_path: Path
) -> None:
    judges(lambda job: say(job, "it is so"))
    (_, one), (_, two) = (judged(kept, job_of(tmp_path, name)) for name in ("llama", "gpt2"))
    assert one.error == two.error == "it is so"
    assert one.seed != two.seed


def test_the_time_limit_ends_the_judge_and_what_it_started(
    kept: KeptJudge, judges: Callable[[Judge], None], tmp_path: Path
) -> None:
    def judge(job: Job) -> None:
        if job.target.name == "slow":
            time.sleep(60)
        process = subprocess.Popen(["sleep", "60"])
        (job.folder / "pid").write_text(str(process.pid))
        say(job)

    judges(judge)
    llama = job_of(tmp_path, "llama")
    _, one = judged(kept, llama)
    assert judged(kept, job_of(tmp_path, "slow"), seconds=0.5)[0] is None
    until = time.monotonic() + 20
    status = Path("/proc", (llama.folder / "pid").read_text(), "stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)
    code, two = judged(kept, job_of(tmp_path, "gpt2"))
    assert code == 0
    assert one.seed != two.seed

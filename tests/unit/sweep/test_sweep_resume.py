"""What ended is not run again, unless something that it depends on changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from onboard.errors import UsageError
from onboard.workflow.sweep.executors import Started
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.job import Job
from onboard.workflow.sweep.store import KEY, RECORD, source_hash
from onboard.workflow.sweep.sweep import Sweep, SweepOptions
from onboard.workflow.sweep.target_record import TargetRecord

TARGETS = [Target(name=name) for name in ("llama", "gpt2", "bloom")]


@dataclass
class Noting:
    """An executor that notes its jobs and says that each died; the last `left` are never done."""

    left: int = 0
    ran: list[str] = field(default_factory=list)

    def run(self, jobs: Sequence[Job], started: Started) -> Iterator[tuple[Job, TargetRecord]]:
        for job in jobs[: len(jobs) - self.left]:
            started(job)
            self.ran.append(job.target.name)
            job.folder.mkdir(parents=True, exist_ok=True)
            yield job, TargetRecord(target=job.target, end="lost", detail=job.target.name)


def sweep(
    root: Path, options: SweepOptions | None = None, *, source: str = "s", left: int = 0
) -> list[str]:
    """Return the targets that were run; every target has to have its entry, unless the executor
    stopped early.
    """
    executor = Noting(left)
    entries = [
        entry
        for entry, _ in Sweep(TARGETS, root, options or SweepOptions(), source).run(
            executor, lambda _: None
        )
    ]
    assert len(entries) == len(TARGETS) - left
    assert all(entry.reason.endswith(entry.type) for entry in entries)
    return executor.ran


NAMES = [target.name for target in TARGETS]


def test_a_second_sweep_runs_nothing(tmp_path: Path) -> None:
    assert sweep(tmp_path) == NAMES
    assert sweep(tmp_path) == []


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    assert sweep(tmp_path, left=2) == NAMES[:1]
    assert sweep(tmp_path) == NAMES[1:]


def test_fresh_runs_all(tmp_path: Path) -> None:
    sweep(tmp_path)
    assert sweep(tmp_path, SweepOptions(fresh=True)) == NAMES


@pytest.mark.parametrize(
    "change",
    [{"until": "run"}, {"device": "cuda"}, {"seconds": 9.0}, {"gibibytes": 1.0}, {"world_size": 2}],
)
def test_other_options_are_another_result(change: dict[str, object], tmp_path: Path) -> None:
    sweep(tmp_path)
    assert sweep(tmp_path, replace(SweepOptions(), **change)) == NAMES  # type: ignore[arg-type]


def test_other_code_is_another_result(tmp_path: Path) -> None:
    sweep(tmp_path)
    assert sweep(tmp_path, source="t") == NAMES


def test_a_result_that_was_cut_off_is_none(tmp_path: Path) -> None:
    sweep(tmp_path)
    folder = tmp_path / ".onboard" / "sweep"
    (folder / "llama" / KEY).unlink()
    (folder / "gpt2" / RECORD).write_text("{")
    assert sweep(tmp_path) == ["llama", "gpt2"]


def test_the_source_hash_is_of_the_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = source_hash()
    assert source_hash() == before
    from onboard.workflow.sweep import store

    (tmp_path / "transforms").mkdir()
    monkeypatch.setattr(store, "CONTENT_ROOT", tmp_path)
    without = source_hash()
    (tmp_path / "transforms" / "x.py").write_text("1")
    first = source_hash()
    (tmp_path / "transforms" / "x.py").write_text("2")
    assert len({before, without, first, source_hash()}) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"until": "tests"},
        {"until": "generate"},
        {"until": "analyze", "world_size": 2},
        {"seconds": 0},
        {"gibibytes": -1},
        {"seconds": float("nan")},
        {"mode": "transformers", "world_size": 2},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SweepOptions(**options)  # type: ignore[arg-type]

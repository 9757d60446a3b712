"""What a slot of a Ray cluster brings back, and what is said without Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onboard.errors import UsageError
from onboard.workflow.sweep.executors import Worker
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.job import Job
from onboard.workflow.sweep.ray_executor import Slot, pack, ray_executor, unpack
from onboard.workflow.sweep.target_record import TargetRecord


def test_what_a_job_left_on_its_node_comes_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(_: Worker, job: Job) -> TargetRecord:
        assert job.folder.is_relative_to(tmp_path / "node")
        (job.folder / "root" / "models").mkdir(parents=True)
        (job.folder / "root" / "models" / "x.py").write_text("1")
        # Pytest leaves such; on another node it is nothing
        (job.folder / "link.to").symlink_to(job.folder / "root")
        return TargetRecord(target=job.target, lines=1)

    monkeypatch.setattr(Worker, "do", work)
    (tmp_path / "node").mkdir()
    here = tmp_path / "driver"
    here.mkdir()
    (here / "of an earlier run").touch()
    job = Job(target=Target(name="llama"), folder=here)
    record, files = Slot(str(tmp_path / "node")).do(job.model_dump_json())
    unpack(files, job.folder)
    assert TargetRecord.model_validate_json(record).lines == 1
    assert [path.relative_to(here).as_posix() for path in here.rglob("*.*")] == ["root/models/x.py"]
    assert not (here / "of an earlier run").exists()
    assert list((tmp_path / "node").iterdir()) == []


def test_a_job_without_a_folder_leaves_an_empty_one(tmp_path: Path) -> None:
    unpack(pack(tmp_path / "none"), tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"which is missing. pip install 'onboard\[ray\]'"):
        ray_executor("cpu", None, None)

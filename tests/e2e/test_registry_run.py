"""`onboard registry run` over ten tiny entries: killed in the middle, resumed, two at once; matrix
from its rows.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onboard import registry
from onboard.content import CONTENT_ROOT
from onboard.registry import RegistryEntry, load_entries, models_path
from onboard.registry_text import insert_entry
from onboard.workflow.registry_results import Result, load_results
from onboard.workflow.reporting.support_matrix import empty_matrix, matrix_path, refreshed
from tests.support.checkpoints import MODEL_FILE, save_checkpoint

pytestmark = pytest.mark.exhaustive
NAMES = ("bear", "crow", "deer", "fox", "hare", "lynx", "mole", "newt", "otter", "owl")


def _start(root: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "onboard", *words, "--root", str(root), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finish(process: subprocess.Popen[str]) -> str:
    stdout, stderr = process.communicate(timeout=1200)
    assert process.returncode == 0, stderr
    return stdout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root in which ten checkpoints are registered and none was run."""
    folder, text = tmp_path / "root", registry.HEADER
    shutil.copytree(MODEL_FILE.parent, folder / "models")
    (folder / "registry" / "configs").mkdir(parents=True)
    for name in NAMES:
        checkpoint = save_checkpoint(tmp_path / name)
        registry.config_path(folder, name).write_text(f"model: {checkpoint}\nmax_seq_len: 64\n")
        files = ["dashboard_default.yaml", "world_size_1.yaml", f"{name}.yaml"]
        text = insert_entry(
            text, RegistryEntry(name=name, config_id=name, yaml_extra=files, family="llama")
        )
    models_path(folder).write_text(text)
    return folder


def _kill_with(number: int, root: Path, more: int) -> list[Result]:
    """Run until there are `more` rows and end it with a signal; return the rows, of which none was
    lost or changed.
    """
    before, process = load_results(root), _start(root, "registry", "run", "--jobs", "1")
    deadline = time.monotonic() + 600
    while len(load_results(root)) < len(before) + more and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == -number
    after = load_results(root)
    assert len(after) >= len(before) + more
    assert [row for row in after if row in before] == before
    return after


def test_killed_and_resumed_with_rows_matrix_and_verdicts(root: Path) -> None:
    _kill_with(signal.SIGKILL, root, 1)
    before = _kill_with(signal.SIGTERM, root, 2)
    assert len(before) < len(NAMES)
    two = [_start(root, "registry", "run", "--jobs", "1", "--json") for _ in range(2)]
    said = [row for process in two for row in json.loads(_finish(process))]
    assert {row["name"] for row in said} == set(NAMES) - {row.name for row in before}
    results = load_results(root)
    assert [row.name for row in results] == sorted(NAMES), "none is lost, none is double"
    assert before == [row for row in results if row.name in {each.name for each in before}], (
        "they were left alone"
    )
    for row in results:
        assert (row.status, row.device, row.dtype, row.layers) == ("passed", "cpu", "float32", None)
        assert row.tokens_per_second
        assert row.peak_memory_bytes
        assert (row.features["batched_decode"], row.features["prefix_reuse"]) == ("Yes", "Yes")
    matrix = empty_matrix()
    for entry in load_entries(root):
        matrix = refreshed(matrix, entry, [row for row in results if row.name == entry.name])
        assert entry.status == "passed"
    assert matrix_path(root).read_text() == matrix
    assert all(f"| {name} | Untested | Yes | Untested | Yes |" in matrix for name in NAMES)
    _changed(root)


def _changed(root: Path) -> None:
    """A fragment changes a run, and with it what `--changed` means."""
    assert _finish(_start(root, "registry", "run", "--changed")) == "0 passed\n0 failed\n"
    (root / "registry" / "configs" / "short.yaml").write_text("max_seq_len: 48\n")
    path = models_path(root)
    path.write_text(
        path.read_text().replace("      - owl.yaml\n", "      - owl.yaml\n      - short.yaml\n")
    )
    assert _finish(_start(root, "registry", "run", "--changed")) == "1 passed\n0 failed\n"
    output = root / ".onboard" / "registry_runs" / "owl" / "agent.json"
    assert json.loads(output.read_text())["settings"]["max_seq_len"] == 48


def test_the_demo_checkpoint_on_two_ranks(tmp_path: Path) -> None:
    shutil.copytree(CONTENT_ROOT / "models", tmp_path / "models")
    (tmp_path / "registry" / "configs").mkdir(parents=True)
    checkpoint = CONTENT_ROOT / "onboard" / "assets" / "demo"
    registry.config_path(tmp_path, "demo").write_text(f"model: {checkpoint}\nmax_seq_len: 64\n")
    files = ["dashboard_default.yaml", "world_size_1.yaml", "demo.yaml"]
    entry = RegistryEntry(name="demo", config_id="demo", yaml_extra=files, family="llama")
    models_path(tmp_path).write_text(insert_entry(registry.HEADER, entry))
    said = _finish(_start(tmp_path, "registry", "run", "--world-size", "2", "--json"))
    (row,) = json.loads(said)
    assert (row["status"], row["world_size"]) == ("passed", 2)
    found = json.loads((tmp_path / ".onboard/registry_runs/demo/agent.json").read_text())
    assert found["settings"]["world_size"] == 2
    checks = {check["what"]: check["error"] for check in found["comparison"]["checks"]}
    assert checks.keys() >= {"prefill", "cached decode", "text"}
    assert max(checks.values()) < 1e-5
    (kept,) = load_results(tmp_path)
    assert kept.world_size == 2
    assert load_entries(tmp_path)[0].status == "untested", "it did not run as configured"

"""A run may be killed at any moment, and two may share a root: the files come out the same."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import tree

PAUSE = 0.02
# Times, and the log of what happened: they differ between any two runs.
VARYING = ("state.json", "worklog.md", "worklog.jsonl")


def start(model: Path, root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.fakes", str(model), str(root), str(PAUSE)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    return stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.fixture
def undisturbed(model: Path, tmp_path: Path) -> tuple[dict[str, str], float]:
    """The tree that a run of its own leaves, and how long its phases take."""
    process = start(model, tmp_path / "undisturbed")
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    finish(process)
    return tree(tmp_path / "undisturbed", ignore=VARYING), time.monotonic() - began


def test_killed_at_random_moments(
    model: Path, undisturbed: tuple[dict[str, str], float], tmp_path: Path
) -> None:
    expected, seconds = undisturbed
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    moments = random.Random(seed)
    killed = 0
    # A run that ends before its moment is right too, and is not one of the ten
    for attempt in itertools.count():
        root = tmp_path / f"root{attempt}"
        process = start(model, root)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        finish(start(model, root))
        assert tree(root, ignore=VARYING) == expected, f"attempt {attempt}"
        repeated = finish(start(model, root))
        assert repeated.split()[1:] == [
            f"{name}:skipped" for name in ("one", "two", "three", "four", "five")
        ]
        if killed == 10:
            break


def test_killed_again_and_again(
    model: Path, undisturbed: tuple[dict[str, str], float], tmp_path: Path
) -> None:
    """Each run lives a little longer than a phase needs, so that the work gets done in pieces."""
    expected, seconds = undisturbed
    root = tmp_path / "root"
    for _ in range(20):
        process = start(model, root)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds / 3)
        process.kill()
        process.communicate()
        if process.returncode == 0:
            break
    finish(start(model, root))
    assert tree(root, ignore=VARYING) == expected


def test_two_models_at_once(tmp_path: Path) -> None:
    models = [tmp_path / name for name in ("a", "b")]
    for model in models:
        model.mkdir()
    together, apart = tmp_path / "together", tmp_path / "apart"
    for process in [start(model, together) for model in models]:
        assert "skipped" not in finish(process)
    for model in models:
        finish(start(model, apart))
    assert tree(together, ignore=VARYING) == tree(apart, ignore=VARYING)
    assert (together / "registry" / "models.txt").read_text() == "a\nb\n"


def test_the_same_model_twice_at_once(
    model: Path, undisturbed: tuple[dict[str, str], float], tmp_path: Path
) -> None:
    """One of them works, the other waits and then finds all of it done."""
    root = tmp_path / "root"
    lines = sorted(
        finish(process).split("\n")[1] for process in [start(model, root) for _ in range(2)]
    )
    assert lines[0].count("done") == 5
    assert lines[1].count("skipped") == 5
    assert tree(root, ignore=VARYING) == undisturbed[0]

"""A run may be killed at any moment, and two may share a root: the files come out the same."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.checkpoints import tree
from tests.support.warm import Warm

PAUSE = 0.02
# Times, and the log of what happened: they differ between any two runs.
VARYING = ("state.json", "worklog.md", "worklog.jsonl")


def words(model: Path, root: Path) -> tuple[str, ...]:
    return "tests.support.fakes", str(model), str(root), str(PAUSE)


def finish(warm: Warm, model: Path, root: Path) -> str:
    """Run the phases to their end; return what is printed."""
    done = warm(*words(model, root))
    assert done.returncode == 0, done.stderr
    return done.stdout


def end_after(seconds: float, warm: Warm, model: Path, root: Path) -> bool:
    """Begin to run the phases, and kill the process so long after they have begun, if it lives;
    return whether it did.
    """
    with warm.started(*words(model, root)) as (process, printed):
        assert printed.readline() == "ready\n"
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
    return process.code != 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.fixture
def undisturbed(model: Path, warm: Warm, tmp_path: Path) -> tuple[dict[str, str], float]:
    """The tree that a run of its own leaves, and how long its phases take."""
    with warm.started(*words(model, tmp_path / "undisturbed")) as (_, printed):
        assert printed.readline() == "ready\n"
        began = time.monotonic()
    return tree(tmp_path / "undisturbed", ignore=VARYING), time.monotonic() - began


def test_killed_at_random_moments(
    model: Path, undisturbed: tuple[dict[str, str], float], warm: Warm, tmp_path: Path
) -> None:
    expected, seconds = undisturbed
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    moments = random.Random(seed)
    killed = 0
    # A run that ends before its moment is right too, and is not one of the ten
    for attempt in itertools.count():
        root = tmp_path / f"root{attempt}"
        killed += end_after(moments.uniform(0, seconds), warm, model, root)
        finish(warm, model, root)
        assert tree(root, ignore=VARYING) == expected, f"attempt {attempt}"
        repeated = finish(warm, model, root)
        assert repeated.split()[1:] == [
            f"{name}:skipped" for name in ("one", "two", "three", "four", "five")
        ]
        if killed == 10:
            break


def test_killed_again_and_again(
    model: Path, undisturbed: tuple[dict[str, str], float], warm: Warm, tmp_path: Path
) -> None:
    """Each run lives a little longer than a phase needs, so that the work gets done in pieces."""
    expected, seconds = undisturbed
    root = tmp_path / "root"
    for _ in range(20):
        if not end_after(seconds / 3, warm, model, root):
            break
    finish(warm, model, root)
    assert tree(root, ignore=VARYING) == expected


def test_two_models_at_once(warm: Warm, tmp_path: Path) -> None:
    models = [tmp_path / name for name in ("a", "b")]
    for model in models:
        model.mkdir()
    together, apart = tmp_path / "together", tmp_path / "apart"
    with ThreadPoolExecutor() as threads:
        printed = threads.map(lambda model: finish(warm, model, together), models)
    assert all("skipped" not in each for each in printed)
    for model in models:
        finish(warm, model, apart)
    assert tree(together, ignore=VARYING) == tree(apart, ignore=VARYING)
    assert (together / "registry" / "models.txt").read_text() == "a\nb\n"


def test_the_same_model_twice_at_once(
    model: Path, undisturbed: tuple[dict[str, str], float], warm: Warm, tmp_path: Path
) -> None:
    """One of them works, the other waits and then finds all of it done."""
    root = tmp_path / "root"
    with ThreadPoolExecutor() as threads:
        printed = list(threads.map(lambda _: finish(warm, model, root), range(2)))
    lines = sorted(each.split("\n")[1] for each in printed)
    assert lines[0].count("done") == 5
    assert lines[1].count("skipped") == 5
    assert tree(root, ignore=VARYING) == undisturbed[0]

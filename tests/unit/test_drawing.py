"""Draws of a run follow from its word and from each test's name, in whatever process and order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.drawing import DRAW, cover
from tests.support.warm import Warm

_CASES = """
import os, random, pytest, torch

@pytest.fixture(scope="module")
def shared():
    return random.random(), float(torch.rand(()))

@pytest.fixture
def own():
    return random.random()

@pytest.mark.parametrize("case", range(3))
def test_draws(case, shared, own):
    drawn = own, random.random(), float(torch.rand(())), os.environ["ONBOARD_SEED"]
    with open(os.environ["DRAWN"], "a") as file:
        print(case, shared, *drawn, file=file)

@pytest.mark.drawn
@pytest.mark.parametrize("one", range(4))
@pytest.mark.parametrize(("other", "third"), [(0, 0), (1, 0), (2, 1)])
def test_pairs(one, other, third):
    with open(os.environ["DRAWN"], "a") as file:
        print(one * 10 + other, "is run", file=file)

@pytest.mark.drawn(few=2)
@pytest.mark.parametrize("one", range(5))
def test_some(one):
    with open(os.environ["DRAWN"], "a") as file:
        print(one, "is run", file=file)
"""


def _drawn(warm: Warm, folder: Path, word: str | None, *options: str) -> dict[str, str]:
    """Return what each of the cases that a run of its own takes says."""
    root = Path(__file__).parents[2]
    (folder / "tests" / "support").mkdir(parents=True, exist_ok=True)
    for name in ("conftest.py", "support/drawing.py"):
        text = (root / "tests" / name).read_text(encoding="utf-8")
        (folder / "tests" / name).write_text(text, encoding="utf-8")
    (folder / "tests" / "test_cases.py").write_text(_CASES, encoding="utf-8")
    out = folder / "drawn"
    out.unlink(missing_ok=True)
    settings = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-o", "pythonpath=."]
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in (DRAW, "ONBOARD_SEED") or name.startswith("PYTEST"):
                patch.delenv(name)
        patch.setenv("DRAWN", str(out))
        if word:
            patch.setenv(DRAW, word)
        patch.chdir(folder)
        done = warm("pytest", *settings, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(" ", 1) for line in out.read_text(encoding="utf-8").splitlines())


def test_a_run_is_repeated_by_its_word(warm: Warm, tmp_path: Path) -> None:
    whole = _drawn(warm, tmp_path, "word", "tests/test_cases.py::test_draws")
    assert len(set(whole.values())) == 3  # each case draws for itself
    alone = _drawn(warm, tmp_path, "word", "tests/test_cases.py::test_draws[2]")
    assert alone == {"2": whole["2"]}
    assert _drawn(warm, tmp_path, None, "tests/test_cases.py::test_draws[2]") != alone


def test_a_few_of_like_cases_have_every_value(warm: Warm, tmp_path: Path) -> None:
    taken = _drawn(
        warm, tmp_path, "word", "-m", "not exhaustive", "tests/test_cases.py::test_pairs"
    )
    cases = set(map(int, taken))
    assert len(cases) == 4
    assert {case // 10 for case in cases} == {0, 1, 2, 3}
    assert {case % 10 for case in cases} == {0, 1, 2}
    some = _drawn(warm, tmp_path, "word", "-m", "not exhaustive", "tests/test_cases.py::test_some")
    assert len(some) == 2
    assert len(_drawn(warm, tmp_path, "word", "tests/test_cases.py::test_some")) == 5


def test_a_run_s_word_says_which_few(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {f"{one} {other}": {"one": one, "other": other} for one in "abcdef" for other in "xyz"}
    found = []
    for word in ("word", "word", "other"):
        monkeypatch.setenv(DRAW, word)
        found.append(cover(cases))
    assert found[0] == found[1] != found[2]

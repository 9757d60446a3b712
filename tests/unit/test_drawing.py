"""Draws of a run follow from its word and from each test's name, in whatever process and order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.drawing import DRAW

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
"""


def _drawn(folder: Path, word: str | None, *options: str) -> dict[str, str]:
    """Return what each of three cases draws in a run of its own."""
    root = Path(__file__).parents[2]
    (folder / "tests" / "support").mkdir(parents=True, exist_ok=True)
    for name in ("conftest.py", "support/drawing.py"):
        text = (root / "tests" / name).read_text(encoding="utf-8")
        (folder / "tests" / name).write_text(text, encoding="utf-8")
    (folder / "tests" / "test_cases.py").write_text(_CASES, encoding="utf-8")
    out = folder / "drawn"
    out.unlink(missing_ok=True)
    names = {DRAW, "ONBOARD_SEED"} | {name for name in os.environ if name.startswith("PYTEST")}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"DRAWN": str(out)} | ({DRAW: word} if word else {})
    settings = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-o", "pythonpath=."]
    command = [sys.executable, "-m", "pytest", *settings, *options]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return dict(line.split(" ", 1) for line in out.read_text(encoding="utf-8").splitlines())


def test_a_run_is_repeated_by_its_word(tmp_path: Path) -> None:
    whole = _drawn(tmp_path, "word", "tests")
    assert len(set(whole.values())) == 3  # each case draws for itself
    alone = _drawn(tmp_path, "word", "tests/test_cases.py::test_draws[2]")
    assert alone == {"2": whole["2"]}
    assert _drawn(tmp_path, None, "tests/test_cases.py::test_draws[2]") != alone

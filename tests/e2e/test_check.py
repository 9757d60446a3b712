"""`onboard check`: the committed families are what the tool generates, and a file that is not is
shown.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onboard.content import CONTENT_ROOT
from onboard.workflow.zoo import ZOO, load_zoo
from tests.support.warm import Warm

SAMPLE = ("gemma2", "qwen3_moe", "deepseek_v3", "mamba")
DRAWN = 2
"""So many of them are generated in one run of the tests."""


Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def check(warm: Warm) -> Check:
    return lambda root, *words: warm("onboard", "check", *words, "--root", root)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the folders that hold a family's files."""
    for name in ("models", "registry", "cookbooks", "tests/equivalence"):
        shutil.copytree(CONTENT_ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
def test_the_committed_files_of_a_sample_are_as_generated(check: Check) -> None:
    sample = random.sample(SAMPLE, DRAWN)
    print(sample)
    done = check(CONTENT_ROOT, *sample)
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""
    assert done.stderr.count("as generated") == DRAWN


def test_every_family_is_committed_in_full() -> None:
    zoo = load_zoo(CONTENT_ROOT)
    assert len(zoo) >= 40
    models = (CONTENT_ROOT / "registry" / "models.yaml").read_text(encoding="utf-8")
    matrix = (CONTENT_ROOT / "registry" / "supported_models.md").read_text(encoding="utf-8")
    for family, members in zoo.items():
        assert (CONTENT_ROOT / "models" / f"modeling_{family}.py").is_file()
        assert (CONTENT_ROOT / "tests" / "equivalence" / f"test_{family}_modeling.py").is_file()
        for name in members:
            assert f"name: {name}\n" in models
            assert f"| {name} |" in matrix


@pytest.mark.slow
def test_drift_is_shown_and_mended(check: Check, checkout: Path) -> None:
    path = checkout / "models" / "modeling_gpt2.py"
    path.write_text(path.read_text().replace("config.layer_norm_epsilon", "1e-3"))
    (checkout / "registry" / "configs" / "gpt2.yaml").unlink()

    shown = check(checkout, "gpt2")
    assert shown.returncode == 1
    assert "+++ models/modeling_gpt2.py (generated now)" in shown.stdout
    assert "+++ registry/configs/gpt2.yaml (generated now)" in shown.stdout
    assert shown.stdout.count("+++ ") == 2

    assert check(checkout, "gpt2", "--write").returncode == 0
    again = check(checkout, "gpt2")
    assert (again.returncode, again.stdout) == (0, "")


@pytest.mark.parametrize(
    ("words", "text"),
    [(["lama"], "Did you mean 'llama'"), (["--root", "nowhere"], f"there is no {ZOO} here")],
)
def test_a_wrong_request_is_one_line(words: list[str], text: str) -> None:
    command = [sys.executable, "-m", "onboard", "check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=CONTENT_ROOT)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1

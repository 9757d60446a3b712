"""A package that is installed and does not fit what else is (a torchvision for another torch) is named,
whoever imports it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onboard.errors import unfit_package
from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

PACKAGE = "no_such_eyes"
RAISES = 'raise OSError("libeyes.so.7: cannot open it")'
WORDS = "fails as it is imported (OSError: libeyes.so.7: cannot open it)"


def _install(folder: Path, text: str, name: str = PACKAGE) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("from . import inner\n")
    (folder / name / "inner.py").write_text(text)
    return folder


def _raised(module: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whichever the package raises
        importlib.import_module(module)
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        RAISES,
        'raise RuntimeError("operator eyes::nms does not exist")',
        "import torch\ntorch.no_such_operator",
        'raise ImportError("libcudart.so.11: cannot open shared object file")',
    ],
)
def test_a_package_that_fails_as_it_is_imported_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(_install(tmp_path, text)))
    error = _raised(PACKAGE)
    hidden = ModuleNotFoundError("Could not import module 'Model'")
    hidden.__cause__ = error
    for said in map(unfit_package, (error, hidden)):
        assert said is not None
        shown = f"{type(error).__name__}: {error}"
        assert f"the package {PACKAGE} is installed" in str(said)
        assert shown in str(said)
        assert f"pip install --upgrade {PACKAGE}" in str(said)
        assert f"pip uninstall {PACKAGE}" in str(said)


def test_other_errors_name_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def look():\n    raise RuntimeError('too dark')\n"
    monkeypatch.syspath_prepend(str(_install(tmp_path, text)))
    inner = importlib.import_module(f"{PACKAGE}.inner")
    with pytest.raises(RuntimeError) as caught:
        inner.look()
    for error in (caught.value, _raised("no_such_package_at_all"), ValueError("never raised")):
        assert unfit_package(error) is None


def test_code_that_imports_it_is_told_so_wherever_it_does(tmp_path: Path) -> None:
    _install(tmp_path / "site", RAISES)
    folders = [
        save_odd(tmp_path / "always", head=f"import {PACKAGE}"),
        save_odd(
            tmp_path / "tried", head=f"try:\n    import {PACKAGE}\nexcept ImportError:\n    pass"
        ),
        save_odd(tmp_path / "late", attention=f"import {PACKAGE}\n{ATTENTION}"),
    ]
    on_path = f"import sys\nsys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    for name, found in run_apart(on_path + GENERATE, folders).items():
        assert WORDS in found["error"], (name, found)
        assert PACKAGE in found["error"], (name, found)


@pytest.mark.parametrize("own", [True, False])
def test_transformers_that_imports_it_costs_one_line(own: bool, tmp_path: Path) -> None:
    # transformers looks for torchvision, and imports it with the first of its models
    site = _install(tmp_path / "site", RAISES, "torchvision")
    model = save_odd(tmp_path / "eyes") if own else tmp_path
    if not own:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    path = os.pathsep.join([str(site), str(Path(__file__).parents[3])])
    command = [sys.executable, "-m", "onboard", str(model), "--root", str(tmp_path / "root")]
    command += ["--trust-remote-code", "--until", "analyze"]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("onboard: the package torchvision"), done.stderr[-2000:]
    assert WORDS in last
    assert done.returncode == 1

"""The demo from an installed wheel, outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_demo_runs_from_a_wheel_outside_the_checkout(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, REPOSITORY, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    _run(*pip, "install", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} <= {"onboard", "bin"}

    place = _run(sys.executable, "-c", "import onboard; print(onboard.__file__)", cwd=tmp_path, PYTHONPATH=str(site))
    assert Path(place.strip()).is_relative_to(site)
    shown = _run(
        *(sys.executable, "-m", "onboard", "demo", "--root", "root", "--device", "cpu"),
        cwd=tmp_path,
        PYTHONPATH=str(site),
    )
    outputs = json.loads((tmp_path / "root/.onboard/demo/run.json").read_text())["runs"]["full"]
    assert outputs["text"]["verdict"] == "equal"
    assert all(record["output"].strip() in shown for record in outputs["prompts"])
    assert (tmp_path / "root/.onboard/demo/report.html").is_file()

"""A wheel in a clean environment, where no checkout is seen: the demo runs, and packages with
extensions are taken.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
EXAMPLE = "onboard-temperature 1.0 (onboard.transforms: temperature)"


def _run(*command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    words = [*map(str, command)]
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done


class Clean:
    """An environment of its own with the project's wheel; the libraries are those of the one that
    runs the tests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "env", symlinks=True, with_pip=False)
        [self.site] = (folder / "env").glob("lib/python*/site-packages")
        self.install(REPOSITORY)
        libraries = [path for path in sys.path if path.endswith("-packages")]
        # An editable install in one is not followed
        (self.site / "libraries.pth").write_text("\n".join(libraries))

    def install(self, project: Path) -> None:
        """Build a project's wheel, and install it alone."""
        wheels = self.folder / f"wheels-{project.name}"
        _run(
            *PIP,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            wheels,
            project,
            cwd=self.folder,
        )
        options = ("--no-deps", "--no-index", "--ignore-installed")
        _run(
            *PIP,
            "--python",
            self.folder / "env",
            "install",
            *options,
            *wheels.glob("*.whl"),
            cwd=self.folder,
        )

    def onboard(self, *words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the command, outside the checkout."""
        return _run(self.folder / "env" / "bin" / "onboard", *words, cwd=self.folder, code=code)

    @contextmanager
    def edited(self, file: str, text: str) -> Iterator[None]:
        """Have another text in an installed file."""
        path = self.site / file
        before = path.read_text()
        path.write_text(text)
        yield
        path.write_text(before)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return Clean(tmp_path_factory.mktemp("clean"))


@pytest.mark.slow
def test_the_demo_runs_from_a_wheel_outside_the_checkout(clean: Clean) -> None:
    own = {
        path.name for path in clean.site.iterdir() if not path.name.endswith((".dist-info", ".pth"))
    }
    assert own == {"onboard"}
    place = _run(
        clean.folder / "env/bin/python",
        "-c",
        "import onboard; print(onboard.__file__)",
        cwd=clean.folder,
    )
    assert Path(place.stdout.strip()).is_relative_to(clean.site)
    shown = clean.onboard("demo", "--root", "root", "--device", "cpu").stdout
    outputs = json.loads((clean.folder / "root/.onboard/demo/run.json").read_text())["runs"]["full"]
    assert outputs["text"]["verdict"] == "equal"
    assert all(record["output"].strip() in shown for record in outputs["prompts"])
    assert (clean.folder / "root/.onboard/demo/report.html").is_file()


FUNCTION = """from onboard.graph.transform import register_transform

@register_transform("temperature", stage="post_load_fusion")
def temperature(gm, context): ...
"""


@pytest.mark.exhaustive
def test_an_installed_package_of_the_document_is_used_and_refused_when_broken(clean: Clean) -> None:
    text = (REPOSITORY / "docs" / "extending.md").read_text("utf-8")
    files = re.findall(
        r"^`(pyproject\.toml|onboard_temperature/\w+\.py)`:\n\n```\w+\n(.*?)^```$",
        text,
        re.S | re.M,
    )
    for name, content in files:
        (clean.folder / "example" / name).parent.mkdir(parents=True, exist_ok=True)
        (clean.folder / "example" / name).write_text(content)
    clean.install(clean.folder / "example")

    listed = clean.onboard("doctor").stdout
    assert f"{EXAMPLE}: transform temperature (post_load_fusion)" in listed
    assert (
        "onboard-temperature 1.0 (onboard.ops: temperature): ops of a namespace of its own"
        in listed
    )

    demo = clean.site / "onboard" / "assets" / "demo"
    words = (
        "run",
        demo,
        "Once upon a time",
        "--device",
        "cpu",
        "--max-tokens",
        "4",
        "--logprobs",
        "1",
        "--json",
    )
    plain, halved = (
        json.loads(clean.onboard(*words, *options).stdout)
        for options in ((), ("--set", "transforms.temperature.temperature=0.5"))
    )
    fact = f"temperature is no part of onboard: it comes from {EXAMPLE}"
    assert fact in halved["facts"]
    assert fact not in plain["facts"]
    assert (
        plain["outputs"][0]["outputs"][0]["token_ids"]
        == halved["outputs"][0]["outputs"][0]["token_ids"]
    )
    assert (
        plain["outputs"][0]["outputs"][0]["logprobs"]
        != halved["outputs"][0]["outputs"][0]["logprobs"]
    )

    module = "onboard_temperature/transform.py"
    for broken, reason in (
        ("import no_such_module\n", "no_such_module"),
        (FUNCTION, "is no BaseTransform"),
    ):
        with clean.edited(module, broken):
            said = clean.onboard(*words, code=2).stderr
            assert (said.count("\n"), EXAMPLE in said, reason in said) == (1, True, True), said
    with clean.edited(module, "import no_such_module\n"):
        assert f"{EXAMPLE}: broken: " in clean.onboard("doctor").stdout

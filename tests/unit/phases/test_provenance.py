"""What a reader needs to repeat a run: when, with what, where, from which commit, by which
command.
"""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from onboard.gpu import processor, version
from onboard.workflow.reporting.provenance import log_head, onboard_command, provenance
from onboard.workflow.reporting.report_view import about
from tests.support.phases import ContextFactory, make_run


def _git(folder: Path, *arguments: str) -> str:
    found = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return found.stdout.strip()


def test_the_command_names_what_the_user_asked_for_and_no_place_of_this_machine(
    context_for: ContextFactory,
) -> None:
    context = context_for("org/tiny")
    assert onboard_command(context) == "onboard org/tiny --root ."
    options = context.options.model_copy(
        update={"device": "cpu", "dtype": "float32", "strict": True, "revision": "v1"}
    )
    asked = onboard_command(replace(context, options=options))
    assert shlex.split(asked) == [
        *(
            "onboard",
            "org/tiny",
            "--root",
            ".",
            "--revision",
            "v1",
            "--device",
            "cpu",
            "--dtype",
            "float32",
        ),
        "--strict",
    ]
    inside = onboard_command(replace(context, model=str(context.root / "my checkpoints" / "a")))
    assert shlex.split(inside)[1] == "./my checkpoints/a"
    outside = onboard_command(replace(context, model="/home/someone/weights/a"))
    assert outside == "onboard path/to/a --root ."


def test_versions_are_those_that_run_and_commits_those_of_checkouts(
    context_for: ContextFactory,
) -> None:
    context = context_for("org/tiny")
    assert provenance(context)["root_commit"] == ""
    _git(context.root, "init", "-q", "-b", "main")
    assert provenance(context)["root_commit"] == "", "no commit yet"
    (context.root / "a.txt").write_text("1")
    _git(context.root, "add", "a.txt")
    _git(context.root, "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-q", "-m", "a")
    head = _git(context.root, "rev-parse", "HEAD")
    found = provenance(context)
    assert found["root_commit"] == head
    assert (found["versions"]["torch"], found["versions"]["transformers"]) == (
        torch.__version__,
        transformers.__version__,
    )
    assert found["host"].startswith(processor())
    head_lines = log_head(found).splitlines()
    assert head_lines[0].endswith("$ onboard org/tiny --root .")
    assert f"commit of the root: {head}" in head_lines
    (context.root / "a.txt").write_text("2")
    assert provenance(context)["root_commit"] == f"{head}-dirty"


def test_the_version_of_torch_names_its_build_whatever_the_metadata_of_its_wheel_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch 2.11.0+cu130, whose metadata say 2.11.0."""
    release = torch.__version__.partition("+")[0]
    monkeypatch.setattr("onboard.gpu.metadata.version", lambda _: release)
    assert version("torch") == torch.__version__
    assert version("transformers") == release


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_heading_says_what_ran_where(device: str) -> None:
    made = {
        "versions": {"onboard": "9.1", "torch": "2.0"},
        "host": "Some CPU, 3 cores",
        "source_commit": "0123456789abcdef-dirty",
        "root_commit": "",
        "onboard": "onboard a/b --root .",
    }
    run = make_run(device=device) | {"date": "2030-01-02T03:04:05+00:00", "provenance": made}
    run["runs"]["full"]["settings"]["device_name"] = "Big GPU"
    assert about(run) == [
        ("Date", "2030-01-02 03:04 UTC"),
        ("Machine", "Big GPU; Some CPU, 3 cores" if device == "cuda" else "Some CPU, 3 cores"),
        ("Versions", "onboard 9.1, torch 2.0"),
        ("Commit", "0123456789ab with changes (onboard)"),
        ("Command", "onboard a/b --root ."),
    ]
    assert about({}) == []

"""Whatever a command is given, and whatever files say: one line, and nothing that a terminal obeys."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from onboard.cli.main import run
from onboard.cli.progress import describe
from onboard.cli.terminal import one_line
from onboard.hub import LocalSource
from onboard.workflow.outcome import PhaseOutcome
from onboard.workflow.phase import RunOptions
from onboard.workflow.phase_runner import open_run
from onboard.workflow.phases.gather import Gather, fingerprint
from onboard.workflow.run_state import hash_inputs

PWN = "\x1b]0;PWN\x07\x1b[2J\u202e\x9b"


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(list(words)) in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert lines[-1].startswith("onboard: ")
    assert "internal error" not in lines[-1]
    assert len(lines[-1]) < 2200
    return lines[-1]


def test_names_longer_than_the_system_allows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "too long" in failure(capsys, "run", "a" * 5000, "x")
    assert "too long" in failure(capsys, str(tmp_path), "--root", "/tmp/" + "a" * 5000)


def test_words_that_are_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no UTF-8" in failure(capsys, "x\udcff", "--until", "gather")


def test_a_folder_that_is_no_model_s_is_not_walked_through(tmp_path: Path) -> None:
    context = open_run("/proc", tmp_path, RunOptions())
    with pytest.raises(Exception, match="has no config.json"):
        Gather().inputs(context)


def test_a_file_whose_name_is_no_utf_8(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("x")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = fingerprint(LocalSource(str(tmp_path)).files())
    assert "\\xff.txt" in found
    assert hash_inputs({"files": found}, {})


def test_a_terminal_gets_no_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 2, "architectures": [PWN]})
    )
    assert_plain(failure(capsys, str(tmp_path), "--until", "gather", "--root", str(tmp_path / "r")))
    assert_plain(describe(PhaseOutcome("gather", "done", summary=f"a {PWN}")))
    assert_plain(one_line(f"{PWN}\n" * 9999))
    assert one_line("plain \n text") == "plain text"


def assert_plain(text: str) -> None:
    assert not [each for each in text if each in PWN and each not in "]0;PWN[2J"]

"""What --json prints: of one shape, whatever the command and however it ends."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onboard.cli import main
from onboard.cli.commands import pr
from onboard.cli.documents import MODELS, Document, render
from onboard.cli.result import Result
from onboard.errors import EXIT_CODES, OnboardError, UsageError
from onboard.workflow import zoo

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
Capture = pytest.CaptureFixture[str]


def document(words: list[str], code: int, capsys: Capture) -> Any:
    """Run a command; its document has to be all of stdout and to be valid."""
    assert main.run([*words, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    own = {name: found[name] for name in ("schema", "command", "status", "error")}
    problem = Document.model_validate(own).error
    assert (problem.exit_code if problem else 0) == code
    assert (own["status"] == "done") == (problem is None) == (code == 0)
    if len(found) > len(own) or problem is None:
        MODELS[found["command"]].model_validate(found)
    return found


@pytest.mark.parametrize("command", sorted(MODELS))
def test_a_wrong_option_is_a_document_too(command: str, capsys: Capture) -> None:
    found = document([*command.split(), "--zzz"], 2, capsys)
    assert found["command"] == command
    assert found["error"]["message"] == "No such option: --zzz"
    assert found["error"]["hint"].endswith("--help")


def test_a_model_that_does_not_exist(capsys: Capture) -> None:
    found = document(["./nonesuch"], 2, capsys)
    assert (found["command"], found["model"], found["phases"]) == ("model", "./nonesuch", [])


def test_every_command_that_has_a_document_is_here() -> None:
    names = {command.name for command in main.app.registered_commands}
    names -= {"serve"}  # it ends when it is told to, and leaves nothing
    of_groups = {command for command in MODELS if " " in command}
    assert names == set(MODELS) - of_groups
    pull_requests = {f"pr {command.name}" for command in pr.app.registered_commands}
    assert of_groups == pull_requests


def test_status_and_doctor(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".onboard" / "org--name"
    folder.mkdir(parents=True)
    phases = {"gather": {"status": "running", "input_hash": "0"}}
    (folder / "state.json").write_text(json.dumps({"model": "org/name", "phases": phases}))
    found = document(["status", "--root", str(tmp_path)], 0, capsys)
    assert found["models"]["org--name"]["phases"]["gather"]["status"] == "interrupted"
    monkeypatch.setattr("onboard.cli.commands.doctor._PACKAGES", ("pydantic",))
    assert document(["doctor"], 0, capsys)["facts"]["pydantic"]


def test_what_a_library_prints_is_no_part_of_a_document(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talking() -> Iterator[tuple[str, str]]:
        print("[ERROR] No checkpoint found")
        yield "gpu", "none"

    monkeypatch.setattr("onboard.cli.commands.doctor._facts", talking)
    assert main.run(["doctor", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["facts"] == {"gpu": "none"}
    assert shown.err == "[ERROR] No checkpoint found\n"
    assert main.run(["doctor"]) == 0
    assert "[ERROR]" in capsys.readouterr().out


def test_check(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    drift = zoo.Drift(tmp_path / "models" / "x.py", "new", "old")
    monkeypatch.setattr(zoo, "load_zoo", lambda root: {"good": None, "bad": None})
    monkeypatch.setattr(zoo, "drifts", lambda family, *_: [drift] if family == "bad" else [])
    found = document(["check", "--root", str(tmp_path)], 1, capsys)
    assert found["drifted"] == {"good": [], "bad": ["models/x.py"]}
    assert document(["check", "good", "--root", str(tmp_path)], 0, capsys)["drifted"] == {
        "good": []
    }


@pytest.mark.parametrize(
    ("error", "status", "problem"),
    [
        (None, "done", None),
        (UsageError("a", hint="b"), "failed", {"message": "a", "hint": "b", "exit_code": 2}),
        (
            KeyboardInterrupt(),
            "interrupted",
            {"message": "interrupted", "hint": "", "exit_code": 130},
        ),
        (
            ValueError("a\nb"),
            "failed",
            {"message": "internal error: ValueError: a b", "hint": "", "exit_code": 1},
        ),
    ],
)
def test_the_head(error: BaseException | None, status: str, problem: Any) -> None:
    found = json.loads(render("run", Result({"model": "m", "status": "mine"}, error)))
    assert found == {
        "schema": 1,
        "command": "run",
        "status": status,
        "error": problem,
        "model": "m",
    }


def test_the_page_has_every_field_and_code() -> None:
    for name, model in MODELS.items():
        heading = next(
            line for line in DOCS.splitlines() if line.startswith("## ") and f"`{name}`" in line
        )
        part = DOCS.split(heading)[1].split("\n## ")[0]
        own = model.model_fields.keys() - Document.model_fields.keys()
        assert [field for field in own if f"`{field}`" not in part] == [], name
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in DOCS
    for kind in OnboardError.__subclasses__():
        assert kind.exit_code in EXIT_CODES


def test_the_tables_of_ops_are_what_is_registered() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "op_tables.py"
    stale = [
        path.name
        for path, text in runpy.run_path(str(script))["written"]().items()
        if path.read_text("utf-8") != text
    ]
    assert stale == [], "python scripts/op_tables.py"

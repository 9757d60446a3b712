from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onboard.errors import ConsentRequiredError, OnboardError, UsageError
from onboard.workflow.outcome import RunOutcome
from onboard.workflow.phase import RunContext, RunOptions
from onboard.workflow.phase_runner import PhaseRunner, load_phases, open_run
from onboard.workflow.phases import PHASES
from tests.support.checkpoints import tree
from tests.support.fakes import Fake, Recorder, copying


def test_phases_are_loaded_without_torch_and_transformers() -> None:
    """So that a run that skips everything takes no longer than its hashes."""
    code = "import sys; from onboard.workflow.phase_runner import load_phases; load_phases(); import onboard.cli.main\n"
    code += "print([name for name in ('torch', 'transformers', 'nbformat') if name in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert loaded.strip() == "[]"


class Workflow:
    """gather -> spec -> code -> test on a folder that holds one config.json; `spec` is a file that
    users edit.
    """

    def __init__(self, folder: Path) -> None:
        self.model, self.root = folder / "model", folder / "root"
        self.model.mkdir()
        (self.model / "config.json").write_text("config\n")
        self.phases = [
            copying("gather", None, "gather.txt"),
            copying("spec", "gather.txt", "spec.txt"),
            copying("code", "spec.txt", "code.txt"),
            copying("test", "code.txt", "test.txt"),
        ]
        for phase in self.phases[:2]:
            phase.judges_input = True  # type: ignore[misc]
        self.phases[1].editable = frozenset({"spec.txt"})  # type: ignore[misc]
        self.recorder = Recorder()

    def run(self, options: RunOptions | None = None, **arguments: Any) -> RunOutcome:
        self.context = open_run(str(self.model), self.root, options or RunOptions())
        return PhaseRunner(self.phases, self.recorder).run(self.context, **arguments)

    def statuses(self, **arguments: Any) -> list[str]:
        return [phase.status for phase in self.run(**arguments).phases]

    def file(self, name: str) -> Path:
        return self.root / ".onboard" / "model" / name

    def state(self) -> dict[str, Any]:
        return json.loads(self.file("state.json").read_text())["phases"]  # type: ignore[no-any-return]

    def fail(self, index: int, error: BaseException) -> None:
        def work(_: RunContext) -> dict[str, str]:
            raise error

        phase = self.phases[index]
        self.phases[index] = Fake(phase.name, phase.inputs, work)
        self.phases[index].judges_input = phase.judges_input  # type: ignore[misc]


@pytest.fixture
def workflow(tmp_path: Path) -> Workflow:
    return Workflow(tmp_path)


def test_runs_in_order_then_skips(workflow: Workflow) -> None:
    outcome = workflow.run()
    assert outcome.status == "done"
    assert workflow.file("test.txt").read_text() == "config\ngather\nspec\ncode\ntest\n"
    assert outcome.document()["artifacts"]["code.txt"] == str(workflow.file("code.txt"))
    before = tree(workflow.root)
    again = workflow.run()
    assert [(phase.status, phase.summary) for phase in again.phases] == [
        ("skipped", "unchanged")
    ] * 4
    assert again.document()["artifacts"] == outcome.document()["artifacts"]
    assert [phase.runs for phase in workflow.phases] == [1, 1, 1, 1]
    assert tree(workflow.root) == before


def test_a_changed_input_reruns_what_depends_on_it(workflow: Workflow) -> None:
    workflow.run()
    (workflow.model / "config.json").write_text("other\n")
    assert workflow.statuses() == ["done"] * 4
    assert workflow.file("test.txt").read_text().startswith("other\n")


def test_a_rerun_with_the_same_result_ends_there(workflow: Workflow) -> None:
    workflow.run()
    workflow.file("gather.txt").unlink()
    assert workflow.statuses() == ["done", "skipped", "skipped", "skipped"]


def test_an_edited_result_is_made_again(workflow: Workflow) -> None:
    workflow.run()
    workflow.file("code.txt").write_text("edited\n")
    assert workflow.statuses() == ["skipped", "skipped", "done", "skipped"]
    assert workflow.file("code.txt").read_text() == "config\ngather\nspec\ncode\n"


def test_an_edited_spec_is_the_users(workflow: Workflow) -> None:
    workflow.run()
    workflow.file("spec.txt").write_text("edited\n")
    assert workflow.statuses() == ["skipped", "skipped", "done", "done"]
    assert workflow.file("test.txt").read_text() == "edited\ncode\ntest\n"
    assert workflow.statuses() == ["skipped"] * 4


def test_an_edited_spec_is_not_overwritten_unasked(workflow: Workflow) -> None:
    workflow.run()
    workflow.file("spec.txt").write_text("edited\n")
    (workflow.model / "config.json").write_text("other\n")
    outcome = workflow.run()
    assert outcome.status == "failed"
    assert "spec.txt was edited" in outcome.phases[-1].error
    assert workflow.file("spec.txt").read_text() == "edited\n"
    assert workflow.file("gather.txt").read_text() == "config\ngather\n"
    # It stays so on every further run, until the user decides.
    assert workflow.statuses() == ["done", "failed"]
    workflow.run(until="gather")
    assert workflow.statuses(from_="spec") == ["skipped", "done", "done", "done"]
    assert workflow.file("spec.txt").read_text() == "other\ngather\nspec\n"


def test_from_keeps_the_edits(workflow: Workflow) -> None:
    workflow.run()
    workflow.file("spec.txt").write_text("edited\n")
    (workflow.model / "config.json").write_text("other\n")
    assert workflow.statuses(from_="code") == ["skipped", "skipped", "done", "done"]
    assert workflow.file("test.txt").read_text() == "edited\ncode\ntest\n"


def test_from_reruns_what_is_unchanged(workflow: Workflow) -> None:
    workflow.run()
    assert workflow.statuses(from_="code") == ["skipped", "skipped", "done", "done"]
    assert [phase.runs for phase in workflow.phases] == [1, 1, 2, 2]


def test_from_needs_what_comes_before(workflow: Workflow) -> None:
    workflow.run(until="gather")
    outcome = workflow.run(from_="code")
    assert outcome.status == "failed"
    assert "spec has no complete result" in outcome.phases[-1].error


def test_until(workflow: Workflow) -> None:
    assert workflow.statuses(until="spec") == ["done", "done"]
    assert not workflow.file("code.txt").exists()
    assert workflow.statuses() == ["skipped", "skipped", "done", "done"]


def test_fresh(workflow: Workflow) -> None:
    workflow.run()
    workflow.file("spec.txt").write_text("edited\n")
    assert workflow.statuses(fresh=True) == ["done"] * 4
    assert workflow.file("spec.txt").read_text() == "config\ngather\nspec\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"until": "cod"}, "there is no phase 'cod'. Did you mean 'code'?"),
        ({"from_": "x"}, "there is no phase 'x'. Valid: code, gather, spec, test"),
        ({"from_": "test", "until": "spec"}, "the phase test comes after spec"),
    ],
)
def test_wrong_requests(workflow: Workflow, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        workflow.run(**arguments)
    assert not workflow.root.exists()


def test_a_failure_ends_the_run_and_is_resumed(workflow: Workflow) -> None:
    sound = workflow.phases[2]
    workflow.fail(2, OnboardError("it broke", hint="Mend it"))
    outcome = workflow.run()
    assert (outcome.status, [phase.status for phase in outcome.phases]) == (
        "failed",
        ["done", "done", "failed"],
    )
    assert outcome.phases[2].error == "it broke. Mend it"
    assert workflow.state()["code"]["status"] == "failed"
    assert workflow.state()["code"]["error"] == "it broke. Mend it"
    assert "it broke" in workflow.file("worklog.md").read_text()
    workflow.phases[2] = sound
    assert workflow.statuses() == ["skipped", "skipped", "done", "done"]


@pytest.mark.parametrize("judge", [0, 1])
@pytest.mark.parametrize("used", [False, True])
def test_a_refused_input_leaves_no_trace(workflow: Workflow, used: bool, judge: int) -> None:
    if used:
        workflow.run()
        (workflow.model / "config.json").write_text("other\n")
    before = tree(workflow.root)
    error = ConsentRequiredError("it is too large")
    workflow.fail(judge, error)
    outcome = workflow.run()
    assert outcome.exception is error
    assert tree(workflow.root) == before
    assert workflow.root.exists() == used


def test_a_defect_is_recorded(workflow: Workflow) -> None:
    workflow.fail(2, ZeroDivisionError("two\nlines"))
    outcome = workflow.run()
    assert outcome.phases[-1].error == "internal error in code: ZeroDivisionError: two lines"
    assert isinstance(outcome.exception, ZeroDivisionError)
    assert "Traceback" in workflow.file("worklog.md").read_text()


def test_an_interrupted_phase_runs_again(workflow: Workflow) -> None:
    sound = workflow.phases[2]
    workflow.fail(2, KeyboardInterrupt())
    outcome = workflow.run()
    assert outcome.status == "interrupted"
    assert isinstance(outcome.exception, KeyboardInterrupt)
    workflow.phases[2] = sound
    assert workflow.statuses() == ["skipped", "skipped", "done", "done"]


def test_new_versions_rerun(workflow: Workflow, monkeypatch: pytest.MonkeyPatch) -> None:
    workflow.run()
    monkeypatch.setattr("onboard.workflow.phase_runner.current_versions", lambda: {"torch": "99"})
    assert workflow.statuses() == ["done"] * 4


def test_dry_run_writes_nothing_and_shows_all(workflow: Workflow) -> None:
    outcome = workflow.run(RunOptions(dry_run=True))
    assert [phase.status for phase in outcome.phases] == ["done"] * 4
    assert not workflow.root.exists()
    assert (
        workflow.context.files.pending[workflow.file("test.txt")]
        == "config\ngather\nspec\ncode\ntest\n"
    )
    assert "+config\n+gather" in workflow.context.files.diff(
        workflow.file("spec.txt"), workflow.root
    )


def test_dry_run_of_a_finished_model_shows_what_would_change(workflow: Workflow) -> None:
    workflow.run()
    before = tree(workflow.root)
    workflow.file("spec.txt").write_text("edited\n")
    edited = tree(workflow.root)
    assert edited != before
    outcome = workflow.run(RunOptions(dry_run=True))
    assert [phase.status for phase in outcome.phases] == ["skipped", "skipped", "done", "done"]
    assert set(workflow.context.files.pending) == {
        workflow.file("code.txt"),
        workflow.file("test.txt"),
    }
    assert tree(workflow.root) == edited


def test_dry_run_plans_what_needs_a_real_result(workflow: Workflow) -> None:
    workflow.phases.insert(2, copying("late", "made-by-executing.json", "late.txt"))
    outcome = workflow.run(RunOptions(dry_run=True))
    assert [phase.status for phase in outcome.phases] == ["done", "done", "planned", "done", "done"]
    assert outcome.phases[2].summary == "would run once made-by-executing.json is there"


def test_weights_are_fetched_when_a_selected_phase_reads_them(workflow: Workflow) -> None:
    workflow.phases[2].needs_weights = True  # type: ignore[misc]
    workflow.run(until="spec")
    assert not workflow.context.options.weights
    workflow.run(RunOptions(dry_run=True))
    assert not workflow.context.options.weights
    workflow.run()
    assert workflow.context.options.weights


def test_damaged_state(workflow: Workflow) -> None:
    workflow.run()
    workflow.file("state.json").write_text("{")
    with pytest.raises(OnboardError, match="--fresh"):
        workflow.run()
    assert workflow.statuses(fresh=True) == ["done"] * 4


def test_the_observer_hears_of_every_phase(workflow: Workflow) -> None:
    workflow.run(until="gather")
    workflow.run(until="spec")
    expected = [
        ("gather", "started"),
        ("gather", "done"),
        ("gather", "skipped"),
        ("spec", "started"),
        ("spec", "done"),
    ]
    assert workflow.recorder.heard == expected


def test_every_listed_phase_can_be_loaded() -> None:
    assert tuple(phase.name for phase in load_phases()) == PHASES


@pytest.mark.parametrize(("page", "begins"), [("using.md", "| "), ("architecture.md", "      -> ")])
def test_the_documents_have_the_phases_in_order(page: str, begins: str) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / page).read_text("utf-8")
    rows = re.findall(rf"^{re.escape(begins)}([a-z_]+(?:, [a-z_]+)*)", text, re.MULTILINE)
    named = [name for row in rows for name in row.split(", ")]
    start = named.index(PHASES[0])
    assert tuple(named[start : named.index(PHASES[-1]) + 1]) == PHASES


def test_folders_of_one_name_have_work_folders_of_their_own(
    workflow: Workflow, tmp_path: Path
) -> None:
    workflow.run()
    other = tmp_path / "elsewhere" / "model"
    other.mkdir(parents=True)
    (other / "config.json").write_text("another config\n")
    first, workflow.model = workflow.model, other
    assert set(workflow.statuses()) == {"done"}
    own = workflow.context.work_dir
    assert own.name.startswith("model-")
    assert set(workflow.statuses()) == {"skipped"}
    workflow.model = first
    assert set(workflow.statuses()) == {"skipped"}
    assert workflow.context.work_dir.name == "model"
    assert (own / "code.txt").read_text() != workflow.file("code.txt").read_text()


def test_the_work_folder_of_a_folder_that_is_gone_is_free(
    workflow: Workflow, tmp_path: Path
) -> None:
    workflow.run()
    moved = tmp_path / "elsewhere" / "model"
    moved.parent.mkdir()
    workflow.model = workflow.model.rename(moved)
    workflow.run()
    assert workflow.context.work_dir.name == "model"
    assert json.loads(workflow.file("state.json").read_text())["model"] == str(moved)


def test_a_work_folder_that_another_model_took_meanwhile_is_refused(
    workflow: Workflow, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere" / "model"
    other.mkdir(parents=True)
    late = open_run(str(other), workflow.root, RunOptions())
    workflow.run()
    with pytest.raises(OnboardError, match="was taken by .* Run again"):
        PhaseRunner(workflow.phases, workflow.recorder).run(late)


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="empty"):
        open_run("", tmp_path, RunOptions())


def test_a_folder_is_the_same_model_however_it_is_written(
    workflow: Workflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow.run()
    monkeypatch.chdir(workflow.model.parent)
    for written in ("model", "./model/", "model/../model"):
        context = open_run(written, workflow.root, RunOptions())
        assert (context.model, context.work_dir) == (
            workflow.context.model,
            workflow.context.work_dir,
        )


def test_libraries_are_imported_ahead_of_the_programs_that_a_later_phase_starts(
    workflow: Workflow,
) -> None:
    workflow.phases[2].starts_programs = True  # type: ignore[misc]
    warmed: list[str] = []

    def run(**arguments: Any) -> list[str]:
        context = open_run(str(workflow.model), workflow.root, RunOptions())
        context.warm_up = lambda: warmed.append(workflow.recorder.heard[-1][0])
        PhaseRunner(workflow.phases, workflow.recorder).run(context, **arguments)
        return [warmed.pop(0) for _ in list(warmed)]

    assert run(until="spec") == []
    assert run(from_="gather") == ["gather", "spec"]
    assert run() == []
    assert run(from_="code") == []

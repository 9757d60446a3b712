"""Phases test and review on a root with a llama model file: as it should be, and broken."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from onboard.analysis.spec import ModelSpec, RepositoryCode
from onboard.errors import OnboardError
from onboard.hub import ModelSource
from onboard.testing.repository_code import repository_code
from onboard.workflow.files import FileWriter
from onboard.workflow.lock import exclusive
from onboard.workflow.phase import RunContext, RunOptions
from onboard.workflow.phases import test as phase
from onboard.workflow.phases.review import ReviewPhase
from onboard.workflow.phases.test import TestPhase, run_tests
from onboard.workflow.processes.pytest_run import run_pytest
from onboard.workflow.worklog import Worklog
from tests.support.warm import Warm

MODEL, TEST = Path("models/modeling_llama.py"), Path("tests/equivalence/test_llama_modeling.py")
Make = Callable[..., RunContext]


@pytest.fixture
def make(tmp_path: Path, llama_files: dict[str, str], llama_spec: ModelSpec) -> Make:
    """Make a context whose root has the model file and the spec, and nothing else."""

    def make_context(change: tuple[str, str] = ("", ""), dry_run: bool = False) -> RunContext:
        files = FileWriter(dry_run=dry_run)
        work_dir = tmp_path / ".onboard" / "llama"
        work_dir.mkdir(parents=True)
        llama_spec.save(work_dir / "spec.yaml")
        text = llama_files[str(MODEL)]
        assert change[0] in text
        files.write(tmp_path / MODEL, text.replace(*change))
        options = RunOptions(device="cpu", dry_run=dry_run)
        source = ModelSource.__new__(ModelSource)  # neither phase looks at the checkpoint
        return RunContext("acme/llama", tmp_path, work_dir, options, files, Worklog(None), source)

    return make_context


def test_the_command_of_tests_that_run_a_models_code_has_the_consent(
    make: Make, llama_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, record = (
        make(),
        {"command": "ONBOARD_SEED=1 python -m pytest t.py", "output": "", "tests": []},
    )
    monkeypatch.setattr(phase, "run_tests", lambda *_, **options: {**record, "gpu": options["gpu"]})
    assert phase.run_written(context, TEST)["command"] == record["command"]
    code = RepositoryCode(classes={}, files={"a.py": "0"}, facts=[], native={})
    llama_spec.model_copy(update={"repository": code}).save(context.artifact("spec.yaml"))
    monkeypatch.setattr(phase, "_handed", lambda _: {})
    found = phase.run_written(context, TEST)
    assert (found["command"], found["gpu"]) == (
        f"ONBOARD_TRUST_REMOTE_CODE=1 {record['command']}",
        False,
    )


def test_the_copy_of_a_models_code_that_is_not_there_is_named_with_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBOARD_TRUST_REMOTE_CODE", "1")
    with pytest.raises(
        OnboardError, match=r"x/code\. This copies it there: onboard MODEL --trust-remote-code"
    ):
        repository_code(tmp_path / "x" / "code")


def test_the_phase_writes_and_runs_the_tests(make: Make) -> None:
    context = make()
    result = TestPhase().run(context)
    record = context.read_json("tests.json")
    assert result.artifacts == {"test_file": str(TEST), "tests": ".onboard/llama/tests.json"}
    assert result.summary.startswith(f"{len(record['tests'])} tests passed, largest float32 error ")
    assert {row["status"] for row in record["tests"]} == {"passed"}
    assert {row["device"] for row in record["tests"]} == {"cpu"}
    assert [row["level"] for row in record["tests"]] == sorted(
        (row["level"] for row in record["tests"]),
        key=["block", "layer", "model", "export", "cached_decode", "several_ranks"].index,
    )
    assert all(0 <= row["error"] <= 1e-5 for row in record["tests"])
    assert record["command"].startswith("ONBOARD_SEED=")
    assert f"{len(record['tests'])} passed" in record["output"]
    left = {
        path.relative_to(context.root).as_posix()
        for path in context.root.rglob("*")
        if path.is_file()
    }
    assert left == {str(MODEL), str(TEST), ".onboard/llama/spec.yaml", ".onboard/llama/tests.json"}


def test_tests_that_were_generated_elsewhere_for_another_model_are_replaced(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone has the family's tests, of another model: its own pass review, the others are
    kept.
    """
    record = {"command": "", "output": "", "tests": []}
    monkeypatch.setattr(phase, "run_tests", lambda *_, **__: record)
    context = make()
    context.files.root, path = context.root, context.root / TEST
    own = phase.tests_text(context)
    model = re.search(r" for (\S+)\.$", own, re.MULTILINE)
    assert model is not None
    others = own.replace(f" for {model[1]}.", " for acme/other.").replace("num_", "other_num_")
    path.parent.mkdir(parents=True)
    path.write_text(others)
    result = TestPhase().run(context)
    assert "replaced the tests of acme/other" in result.summary
    assert path.read_text() == own
    assert [each.backup.read_text() for each in context.files.replaced] == [others]
    edited = own.replace("SEED", "MY_SEED") + "# mine\n"
    path.write_text(edited)
    assert "kept tests/equivalence" in TestPhase().run(context).summary
    assert path.read_text() == edited


def test_the_first_broken_part_is_named_with_both_values(make: Make, warm: Warm) -> None:
    context = make(("self.head_dim**-0.5", "0.2"))
    context.run_module = warm.run_module
    named = (
        r"^test_block\[cpu-model.layers.0.self_attn\] failed \(4 of 11 .* it gives .*, expected "
    )
    with pytest.raises(OnboardError, match=named):
        TestPhase().run(context)
    assert [row["status"] for row in context.read_json("tests.json")["tests"]].count("failed") == 4


def test_a_test_file_that_does_not_import_is_an_error_with_the_reason(
    warm: Warm, tmp_path: Path
) -> None:
    (tmp_path / "test_x.py").write_text("import no_such_module\n")
    with pytest.raises(
        OnboardError, match=r"ran no test of test_x.py: .*No module named 'no_such_module'"
    ):
        run_tests(
            tmp_path,
            Path("test_x.py"),
            gpu=False,
            run=partial(run_pytest, run_module=warm.run_module),
        )


def test_a_dry_run_tests_and_writes_nothing(make: Make, warm: Warm) -> None:
    context = make(dry_run=True)
    context.run_module = warm.run_module
    TestPhase().run(context)
    ReviewPhase().run(context)
    assert {path.name for path in context.root.rglob("*") if path.is_file()} == {"spec.yaml"}
    record = json.loads(context.files.read(context.artifact("tests.json")))
    assert {row["status"] for row in record["tests"]} == {"passed"}


def test_inputs_change_with_the_model_file_and_the_spec(make: Make) -> None:
    context = make()
    before = TestPhase().inputs(context)
    assert before == TestPhase().inputs(context)
    path = context.root / MODEL
    path.write_text(path.read_text() + "\n")
    changed = TestPhase().inputs(context)
    assert {key for key in before if before[key] != changed[key]} == {"model_file"}
    spec = context.spec
    spec.tricky.append("look here")
    spec.save(context.artifact("spec.yaml"))
    assert TestPhase().inputs(context)["spec"] != changed["spec"]


def test_the_review_passes_good_files_and_writes_its_verdicts(
    make: Make, llama_files: dict[str, str]
) -> None:
    context = make()
    context.files.write(context.root / TEST, llama_files[str(TEST)])
    result = ReviewPhase().run(context)
    verdict = context.read_json("review.json")
    assert verdict["verdict"] == "PASS"
    assert result.summary == f"{len(verdict['items'])} items reviewed, all passed"
    assert all(item["verdict"] == "PASS" and item["evidence"] for item in verdict["items"])


def test_the_review_passes_a_proven_text_and_notes_its_style(
    make: Make, llama_files: dict[str, str]
) -> None:
    context = make(("import torch\n", "import torch\nimport math\n"))
    context.files.write(context.root / TEST, llama_files[str(TEST)])
    result = ReviewPhase().run(context)
    verdict = context.read_json("review.json")
    assert (
        result.summary
        == f"{len(verdict['items'])} items reviewed, none failed; style notes: 1 (T11)"
    )
    assert [verdict["verdict"], verdict["notes"]] == ["PASS", 1]
    (noted,) = (item for item in verdict["items"] if item["verdict"] == "NOTE")
    assert [noted["id"], noted["kind"]] == ["T11", "style"]
    assert noted["evidence"][0].startswith("models/modeling_llama.py:")


def test_the_tests_of_a_relative_are_waited_for(make: Make, warm: Warm) -> None:
    """Two models of a family share the place of their tests: each run's own are there until they
    have run.
    """
    context = make()
    context.run_module = warm.run_module
    phase = threading.Thread(target=TestPhase().run, args=[context])
    with exclusive(context.root / ".onboard" / ".tests-llama", waiting=lambda: None):
        phase.start()
        phase.join(3)
        assert phase.is_alive()
        assert not (context.root / TEST).exists()
    phase.join(120)
    assert {row["status"] for row in context.read_json("tests.json")["tests"]} == {"passed"}


def test_the_review_is_of_the_models_own_tests(make: Make, llama_files: dict[str, str]) -> None:
    """A relative's run may have put its own since; what a user made of them is reviewed as it
    is.
    """
    context = make()
    path, own = context.root / TEST, llama_files[str(TEST)]
    relatives = own.replace("config = LlamaConfig(", "config = LlamaConfig(attention_bias=True, ")
    assert relatives != own
    context.files.put(path, own)
    path.write_text(relatives)
    with pytest.raises(OnboardError, match="first E18 "):
        ReviewPhase().run(context)
    left = {path.as_posix(): {sha256(relatives.encode()).hexdigest()}}
    context.files.written_by_others = lambda: left
    ReviewPhase().run(context)
    assert path.read_text() == relatives


def test_the_review_fails_with_the_item_and_the_line(
    make: Make, llama_files: dict[str, str]
) -> None:
    context = make(("position_ids is not None", "input_ids is not None"))
    context.files.write(context.root / TEST, llama_files[str(TEST)])
    with pytest.raises(
        OnboardError,
        match=r"review: 1 of \d+ items failed, first M03 .*: models/modeling_llama.py:1: ",
    ):
        ReviewPhase().run(context)
    items = {item["id"]: item["verdict"] for item in context.read_json("review.json")["items"]}
    assert items["M03"] == "FAIL"
    assert list(items.values()).count("FAIL") == 1

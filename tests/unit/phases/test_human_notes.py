"""What a human should look at is one list, in the report and in the text of the pull request."""

from __future__ import annotations

import re
from typing import Any

from onboard.analysis.spec import RepositoryCode
from onboard.workflow.phases.pull_request import PullRequest
from onboard.workflow.phases.report import Report
from onboard.workflow.reporting.human_notes import human_notes
from tests.support.phases import ContextFactory, make_run, make_spec
from tests.unit.phases.test_report import _finished, _html, _page


def _notes(text: str) -> list[str]:
    section = text.split("What a human should look at\n", 1)[1].split("\n## ", 1)[0]
    return [line for line in section.splitlines() if line.startswith("- ")]


def test_report_and_pull_request_have_the_same_list(context_for: ContextFactory) -> None:
    context = _finished(context_for("org/tiny", tricky=["scales the <embeddings>"]))
    Report().run(context)
    PullRequest().run(context)
    report = _notes(context.artifact("report.md").read_text())
    assert report == _notes(context.artifact("pull_request.md").read_text())
    assert len(report) == 5
    page = (
        _page(_html(context)).text.split("2. What a human should look at")[1].split("3. Files")[0]
    )
    found = human_notes(context.spec, {"run": make_run(), "tests": context.read_json("tests.json"),
                                       "review": context.read_json("review.json")})  # fmt: skip
    assert [note.topic for note in found] == ["model", "not shown", "not shown", "review", "fact"]
    for note, line in zip(found, report, strict=True):
        assert note.text in page
        assert note.text.split(":")[0].split(" <")[0] in line.replace("\\", "")


def _found(**artifacts: Any) -> dict[str, Any]:
    return {"tests": {}, "review": {}, "run": make_run()} | artifacts


def test_each_thing_is_said_once() -> None:
    run = make_run()
    run["runs"]["full"]["facts"] = ["one", "two", "one"]
    texts = [
        note.text for note in human_notes(make_spec("org/tiny", tricky=["two"]), _found(run=run))
    ]
    assert (texts.count("one"), texts.count("two")) == (1, 1)


def test_rules_that_do_not_hold_and_trusted_code_are_among_them() -> None:
    code = RepositoryCode(
        classes={}, files={"modeling_b.py": "0", "a.py": "1"}, facts=[], native={}
    )
    failed = {
        "id": "M1",
        "title": "is lean",
        "kind": "contract",
        "verdict": "FAIL",
        "evidence": ["m.py:1", "m.py:2"],
    }
    held = failed | {"id": "M2", "title": "is proven", "verdict": "PASS"}
    spec = make_spec("org/tiny", repository=code)
    texts = [note.text for note in human_notes(spec, _found(review={"items": [failed, held]}))]
    assert "M1 does not hold: is lean (m.py:1 and 1 more)" in texts
    assert not [text for text in texts if "is proven" in text]
    assert [text for text in texts if re.search(r"trusted and run: a\.py, modeling_b\.py", text)]


def test_the_familys_configs_that_differ_are_among_them_alike_ones_together(
    context_for: ContextFactory,
) -> None:
    differences = {
        "org/a": {
            "tie_word_embeddings": [True, False],
            "rope_parameters.rope_type": [None, "yarn"],
        },
        "org/same": {},
        "org/b": {
            "tie_word_embeddings": [True, False],
            "rope_parameters.rope_type": [None, "yarn"],
        },
        "org/c": {"hidden_act": ["silu", "gelu"]},
    }
    context = _finished(context_for("org/tiny"))
    survey = {"plan": "", "missing": [], "differences": differences}
    texts = [
        note.text
        for note in human_notes(context.spec, _found(survey=survey))
        if note.topic == "model"
    ]
    assert texts == [
        "In the family's file, too, but with another config: org/a, org/b: tie_word_embeddings false (here true), "
        "rope_parameters.rope_type yarn (here not set).",
        "In the family's file, too, but with another config: org/c: hidden_act gelu (here silu).",
    ]
    context.write_json("survey.json", survey)
    Report().run(context)
    PullRequest().run(context)
    for name in ("report.html", "report.md", "pull_request.md"):
        assert "gelu (here silu)" in context.artifact(name).read_text()


def test_a_road_without_a_run_says_so() -> None:
    assert "There was no full run." in [
        note.text for note in human_notes(make_spec("a"), _found(run={}))
    ]

"""An agent's review: a verdict with evidence on every item, of files that it only reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onboard.agents.assignment import Assignment
from onboard.agents.reviewing import asked_review
from onboard.agents.role_runs import Records, load_runs
from onboard.agents.roles import REVIEWER, ChecklistItem, ReviewTask
from onboard.agents.workspace import Workspace
from onboard.errors import OnboardError
from onboard.workflow.files import write_atomically
from tests.support.assignments import BAD, MODEL, TEST, TESTS, scripted

ITEMS = {"A01": "it has a class", "A02": "it has a forward"}


def assignment(folder: Path, script: str, **changes: Any) -> Assignment:
    checklist = [ChecklistItem(id=id, title=title) for id, title in ITEMS.items()]
    task = ReviewTask(model="acme/x", model_file=MODEL, test_file=TESTS, checklist=checklist)
    records = Records.load(folder, write_atomically)
    files = Workspace({MODEL: BAD, TESTS: TEST})
    return Assignment(REVIEWER, task, scripted(script, **changes), files, records)


def verdicts(**found: str) -> str:
    items = [
        {"id": id, "verdict": verdict, "evidence": [f"{MODEL}:3: return x * 2"]}
        for id, verdict in found.items()
    ]
    return f"print({json.dumps({'items': items})!r})"


def test_each_item_gets_its_verdict_and_an_unchanged_file_is_not_reviewed_again(
    tmp_path: Path,
) -> None:
    script = verdicts(A01="PASS", A02="FAIL")
    found = asked_review(assignment(tmp_path, script), ITEMS)
    assert {item.id: item.verdict for item in found} == {"A01": "PASS", "A02": "FAIL"}
    assert asked_review(assignment(tmp_path, script), ITEMS) == found
    (run,) = load_runs(tmp_path)
    assert (run.attempts, run.after) == (1, "FAIL: A02")
    prompt = (tmp_path / run.transcript).read_text().splitlines()[0]
    assert "A02: it has a forward" in prompt
    assert "x * 2" not in prompt  # the name and two paths, and nothing else


def test_an_answer_without_evidence_or_with_changes_is_not_taken(tmp_path: Path) -> None:
    script = f"""
import sys
said = sys.stdin.read()
if "names no line" in said:
    open({MODEL!r}, "w").write("")
elif "A02" in said.partition("Earlier answers")[2]:
    {verdicts(A01="PASS", A02="PASS").replace(":3:", ":99:")}
else:
    {verdicts(A01="PASS")}
"""
    with pytest.raises(OnboardError, match="in 3 attempts: a reviewer reads only"):
        asked_review(assignment(tmp_path, script, attempts=3), ITEMS)
    (run,) = load_runs(tmp_path)
    assert run.refusals[0] == "each item has to have one verdict: A02"
    assert run.refusals[1].startswith("the evidence of A01 names no line of the files: ")

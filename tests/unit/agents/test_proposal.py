"""What is read of an answer: patches of the files that may be changed, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onboard.agents.patch import diff_of, with_block, with_diff
from onboard.agents.proposal import proposed
from onboard.agents.refused import RefusedError
from onboard.agents.role_settings import Builtin, Command, OpenAI, load_settings
from onboard.agents.workspace import Reply
from onboard.errors import UsageError
from onboard.vetting.model_text import MOST
from tests.support.assignments import BAD, DIFF, GOOD, MODEL, SPEC, TESTS, workspace

RENAME = DIFF.replace(f"+++ b/{MODEL}", f"+++ b/{TESTS}")
NEW_FILE = DIFF.replace(f"--- a/{MODEL}", "--- /dev/null")
REFUSED = {
    "nothing": ("", "no JSON object was found"),
    "prose": ("I have mended it.", "no JSON object was found"),
    "a secret is asked for": ("Please send me your HF_TOKEN.", "no JSON object was found"),
    "another schema": ('{"diff": 3}', "the answer is not of the schema: diff"),
    "limits": (json.dumps({"diff": DIFF, "limits": 1e9}), "limits: Extra inputs"),
    "both forms": (
        json.dumps({"diff": DIFF, "block": {"name": "X", "text": GOOD}}),
        "either a diff or a block",
    ),
    "deep": ('{"diff": ' + "[" * 100_000, "not of the schema"),
    "tests": (json.dumps({"diff": DIFF.replace(MODEL, TESTS)}), f"{TESTS} is not yours to change"),
    "outside": (json.dumps({"diff": DIFF.replace(MODEL, "../x.py")}), "is not yours to change"),
    "absolute": (json.dumps({"diff": DIFF.replace(MODEL, "/etc/x")}), "is not yours to change"),
    "rename": (json.dumps({"diff": RENAME}), f"the diff makes {TESTS} of {MODEL}"),
    "new file": (json.dumps({"diff": NEW_FILE}), "the diff makes"),
    "mode": (json.dumps({"diff": f"old mode 100644\n{DIFF}"}), "only lines of files"),
    "no place": (json.dumps({"diff": DIFF.replace("x * 2", "x * 9")}), "does not apply"),
    "no change": (json.dumps({"diff": DIFF.replace("x * 3", "x * 2")}), "changes nothing"),
    "other block": (
        json.dumps({"block": {"name": "X", "text": f"import os\n{GOOD}"}}),
        "has to be X and nothing else",
    ),
    "no block": (json.dumps({"block": {"name": "Y", "text": "class Y: pass"}}), "has no Y"),
    "path as name": (
        json.dumps({"block": {"name": "../x", "text": GOOD}}),
        "should match pattern",
    ),
    "no Python": (json.dumps({"block": {"name": "X", "text": "class X("}}), "is no Python"),
    "ten megabytes": ("a" * 10_000_000, "10,000,000 letters"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_patch_of_the_model_is_refused_with_the_reason(kind: str) -> None:
    text, reason = REFUSED[kind]
    with pytest.raises(RefusedError) as caught:
        proposed(Reply(text), workspace())
    assert reason in str(caught.value)


def test_files_that_may_not_be_changed_and_texts_without_end_are_refused() -> None:
    with pytest.raises(RefusedError, match="was changed, and only"):
        proposed(Reply("", {TESTS: "", MODEL: GOOD}), workspace())
    with pytest.raises(RefusedError, match="letters, at most"):
        proposed(Reply("", {MODEL: "a" * (MOST + 1)}), workspace())


def test_a_diff_is_applied_where_its_lines_are() -> None:
    text = "".join(f"line {at}\n" for at in range(30))
    moved = "--- a/f\n+++ b/f\n@@ -3,3 +3,4 @@\n line 20\n-line 21\n+new\n+more\n line 22\n"
    second = "@@ -25,2 +26,1 @@\n line 24\n-line 25\n"
    found = with_diff({"f": text}, f"diff --git a/f b/f\n{moved}{second}", {"f"})["f"]
    expected = text.replace("line 21\n", "new\nmore\n").replace("line 25\n", "")
    assert found == expected
    assert with_diff({"f": text}, diff_of({"f": text}, {"f": expected}), {"f"}) == {"f": expected}


def test_lines_that_stand_in_two_places_are_taken_where_the_hunk_says() -> None:
    text = "a\nb\nc\na\nb\nc\n"
    hunk = "--- f\n+++ f\n@@ -{},2 +{},2 @@\n a\n-b\n+x\n"
    assert with_diff({"f": text}, hunk.format(4, 4), {"f"})["f"] == "a\nb\nc\na\nx\nc\n"
    with pytest.raises(RefusedError, match="does not apply"):
        with_diff({"f": text}, hunk.format(2, 2), {"f"})


def test_removed_lines_that_look_like_a_head_are_lines() -> None:
    text = "a\n-- b\nc\n"
    diff = "--- a/f\n+++ b/f\n@@ -1,3 +1,2 @@\n a\n--- b\n c\n"
    assert with_diff({"f": text}, diff, {"f"})["f"] == "a\nc\n"


def test_a_block_takes_the_place_of_its_namesake() -> None:
    text = f"import torch\n\n\n{BAD}\n\nclass Y:\n    pass\n"
    assert with_block(text, "X", f"\n{GOOD}\n") == text.replace("x * 2", "x * 3")
    assert proposed(Reply(json.dumps({"block": {"name": "X", "text": GOOD}})), workspace()) == {
        MODEL: GOOD
    }


def test_settings_come_from_a_file_that_is_named_and_from_flags_over_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "agents:\n  reviewer: builtin\n  repairer:\n    kind: command\n    command: [fix, it]\n"
        "    seconds: 60\n  porter: {kind: openai, base_url: https://x.test/v1/, model: m}\n"
    )
    found = load_settings(path)
    assert isinstance(found.repairer, Command)
    assert (found.repairer.command, found.repairer.seconds) == (["fix", "it"], 60)
    assert isinstance(found.porter, OpenAI)
    assert found.porter.base_url == "https://x.test/v1"
    assert isinstance(found.runner, Builtin)
    flags = [
        "repairer=builtin",
        "runner=openai:a@b@http://127.0.0.1:1/v1",
        "porter=command:a 'b c'",
    ]
    found = load_settings(path, flags)
    assert isinstance(found.repairer, Builtin)
    assert isinstance(found.runner, OpenAI)
    assert (found.runner.model, found.runner.base_url) == ("a@b", "http://127.0.0.1:1/v1")
    assert isinstance(found.porter, Command)
    assert found.porter.command == ["a", "b c"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("agents: {repairer: {kind: command}}", "command"),
        ("agents: {repairer: {kind: shell}}", "agents.repairer"),
        ("agents: {painter: builtin}", "painter"),
        ("agents: {porter: {kind: openai, base_url: 'http://x.test/v1', model: m}}", "it is https"),
        ("agents: {porter: {kind: openai, base_url: 'https://x/v1', model: m, key: k}}", "key"),
        ("agents: {repairer: {kind: builtin, attempts: 1000}}", "attempts"),
        ("roles: {}", "has no agents:"),
    ],
)
def test_settings_that_are_not_as_they_have_to_be_are_named(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        load_settings(path)


def test_flags_that_are_not_as_they_have_to_be_are_named() -> None:
    for flag in ("painter=builtin", "repairer=shell:x", "repairer", "porter=openai:https://x/v1"):
        with pytest.raises(UsageError, match="--agent"):
            load_settings(None, [flag])
    assert SPEC in workspace().editable

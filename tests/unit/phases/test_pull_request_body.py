from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from onboard.analysis.spec import RepositoryCode
from onboard.content import CONTENT_ROOT
from onboard.render import inline
from onboard.review.reviewer import CHECKLIST
from onboard.untrusted.visible_text import escaped
from onboard.untrusted.yaml_text import load_yaml
from onboard.workflow.phase import RunContext
from onboard.workflow.phases.pull_request import PullRequest
from onboard.workflow.reporting.pull_request_body import ITEMS, body, update_comment
from onboard.workflow.reporting.run_records import RECORDS
from onboard.workflow.reporting.tested_commit import Pushed
from tests.support.markdown import fences, html, live
from tests.support.phases import ContextFactory, onboarded

LISTED = load_yaml((CONTENT_ROOT / "templates" / ITEMS).read_text("utf-8"), ITEMS)
ALL_ITEMS = [item for section in LISTED for item in section["items"]]
MODEL = "models/modeling_llama.py"
BOXES = ("[x]", "[ ]", "Not applicable:")


def _git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    result = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return result.stdout.strip()


@pytest.fixture
def context(context_for: ContextFactory, tmp_path: Path) -> RunContext:
    """A model with its artifacts, in a checkout whose first commit is `main`."""
    root = tmp_path / "root"
    root.mkdir()
    _git(root, "init", "-q", "-b", "main")
    (root / ".gitignore").write_text(".onboard/\n")
    _git(root, "commit", "-q", "--allow-empty", "-m", "start")
    return onboarded(context_for("org/tiny"))


def _edited(context: RunContext, name: str, **changes: Any) -> None:
    context.write_json(name, context.read_json(name) | changes)


def _with_files(context: RunContext) -> None:
    """Record what the tests and the run were made with, as their phases do."""
    config = context.read_json("registration.json")["config"]
    _edited(context, "tests.json", files=context.digest_of(MODEL))
    _edited(context, "run.json", files=context.digest_of(MODEL, config))


def _pushed(context: RunContext) -> Pushed:
    PullRequest().run(context)
    return Pushed(_git(context.root, "rev-parse", "onboard/tiny"), "main")


def test_every_item_of_the_list_is_there_with_evidence(context: RunContext) -> None:
    assert len(ALL_ITEMS) > 45
    text = body(context, _pushed(context))[0]
    for section in LISTED:
        part = text.split(f"### {section['section']}\n")[1].split("\n### ")[0]
        for item in section["items"]:
            places = [part.find(f"- {box} {item['title']}\n  - `") for box in BOXES]
            assert max(places) >= 0, f"{item['title']} is not there, or without evidence"
    assert f"of {len(ALL_ITEMS)} items are shown" in text


def test_each_item_names_one_thing_that_exists_and_each_record_is_used() -> None:
    records = [item["record"] for item in ALL_ITEMS if "record" in item]
    reviewed = [id for item in ALL_ITEMS for id in item.get("review", [])]
    assert sorted(records) == sorted(RECORDS)
    assert sorted(reviewed) == sorted(item.id for item in CHECKLIST)
    for item in ALL_ITEMS:
        assert len({"record", "review", "inapplicable"} & set(item)) == 1, item


def test_what_does_not_apply_says_why(context: RunContext) -> None:
    text = body(context)[0]
    for item in ALL_ITEMS:
        if "inapplicable" in item:
            assert f"- Not applicable: {item['title']}\n  - `{item['inapplicable']}`" in text


def test_nothing_holds_that_nobody_recorded(context: RunContext) -> None:
    for name in ("gather", "survey", "tests", "review", "run"):
        context.artifact(f"{name}.json").unlink(missing_ok=True)
    text = body(context)[0]
    shown = re.findall(r"^- \[x\] (.*)$", text.split("## Files")[0], re.MULTILINE)
    of_spec = {"source", "traits", "entry", "config", "matrix", "notebook"}
    titles = {item["title"] for item in ALL_ITEMS if item.get("record") in of_spec}
    assert set(shown) == titles


@pytest.mark.parametrize(
    ("name", "changes", "record"),
    [
        ("tests", {"status": "failed", "message": "worse"}, "blocks"),
        ("tests", {"status": "failed", "message": "worse"}, "pytest"),
        ("tests", {"status": "skipped", "message": "no GPU"}, "blocks"),
        ("run", {"status": "build_error", "error": "no"}, "full_run"),
        ("run", {"text": {"verdict": "different", "reason": "worse"}}, "coherent"),
        ("run", {"judged": {"verdict": "incoherent", "reason": "words"}}, "coherent"),
        ("run", {"comparison": None}, "same_logits"),
        ("run", {"prompts": []}, "pairs"),
    ],
)
def test_what_failed_is_open(
    context: RunContext, name: str, changes: dict[str, Any], record: str
) -> None:
    title = next(item["title"] for item in ALL_ITEMS if item.get("record") == record)
    before = body(context)[0]
    assert f"- [x] {title}" in before
    found = context.read_json(f"{name}.json")
    (found["tests"][0] if name == "tests" else found["runs"]["full"]).update(changes)
    context.write_json(f"{name}.json", found)
    assert f"- [ ] {title}" in body(context)[0]


@pytest.mark.parametrize("name", ["reduced", "full"])
def test_a_run_that_ended_early_is_said_with_its_error(context: RunContext, name: str) -> None:
    """As the run phase leaves it: no settings, no prompts, nothing compared."""
    ended = {"description": "all layers", "status": "runtime_error", "error": "CUDA out of memory"}
    _edited(context, "run.json", status="runtime_error", runs={name: ended})
    text = body(context)[0]
    assert "`CUDA out of memory`" in text
    assert "Nothing was generated." in text
    shown = set(re.findall(r"^- \[x\] (.*)$", text.split("## Files")[0], re.MULTILINE))
    of_run = ("reduced_run", "full_run", "same_logits", "coherent", "unsharded", "pairs")
    assert not shown & {item["title"] for item in ALL_ITEMS if item.get("record") in of_run}


def test_an_item_of_the_review_is_open_when_the_reviewer_fails_it(context: RunContext) -> None:
    items = [
        {"id": item.id, "title": "t", "kind": item.kind, "verdict": "PASS", "evidence": ["m:1: x"]}
        for item in CHECKLIST
    ]
    context.write_json("review.json", {"verdict": "PASS", "items": items, "iterations": 3})
    text = body(context)[0]
    assert "- [x] Its module tree has" in text
    assert "PASS after 3 iterations" in text
    next(item for item in items if item["id"] == "M10")["verdict"] = "FAIL"
    context.write_json("review.json", {"verdict": "FAIL", "items": items})
    text = body(context)[0]
    assert "- [ ] Its module tree has" in text
    assert "- [ ] An independent review" in text


def test_lines_of_evidence_are_lines_of_the_commit(context: RunContext) -> None:
    path = context.root / MODEL
    path.write_text("import torch\n\n\nclass LlamaRMSNorm:\n    def forward(self):\n        pass\n")
    tests = context.read_json("tests.json")["tests"]
    row = tests[0] | {"block": "model.norm", "error": 2e-7, "tolerance": 1e-5, "device": "cpu"}
    _edited(context, "tests.json", tests=[row])
    pushed = _pushed(context)
    path.write_text("# Another text\n" * 20)
    text = body(context, pushed)[0]
    assert "`model.norm (models/modeling_llama.py:4-6 LlamaRMSNorm): relative RMSE 2.0e-07" in text
    for name, line, more in re.findall(r"`(registry/[\w./]+):(\d+)(?:-\d+)? ([^`]*)`", text):
        lines = _git(context.root, "show", f"{pushed.commit}:{name}").splitlines()
        wanted = {"models": "- name: org/tiny", "supported_models": "[^tiny]"}.get(Path(name).stem)
        assert wanted is None or wanted in lines[int(line) - 1], (name, line, more)


def test_a_text_is_about_the_files_that_were_tested(context: RunContext) -> None:
    title = "Tests and run were made with the files of that commit"
    pushed = _pushed(context)
    text = body(context, pushed)[0]
    assert "did not record the files" in text
    _with_files(context)
    text = body(context, pushed)[0]
    assert f"- **This pull request:** {pushed.commit}, into `main`\n" in text
    assert "Tests and run were made with the files of this commit" in text
    assert f"- [x] {title}" in text
    (context.root / MODEL).write_text("x = 2\n")
    _edited(context, "tests.json", files=context.digest_of(MODEL))
    text = body(context, pushed)[0]
    assert "**Not all of it was made with the files of this commit:**" in text
    assert f"`The tests had {MODEL} with sha256" in text
    assert "The run had" not in text
    assert f"- [ ] {title}" in text
    assert f"- [x] {title}" not in body(context)[0]


def test_records_that_were_made_anew_take_the_place_of_artifacts(context: RunContext) -> None:
    tests = context.read_json("tests.json") | {"output": "7 passed\n"}
    text = body(context, records={"tests": tests})[0]
    assert "7 passed\n" in fences(text)
    assert "1 passed\n" not in fences(text)


def test_a_commit_is_on_top_of_its_target_or_not(context: RunContext) -> None:
    title = "That commit is on top of the target branch"
    pushed = _pushed(context)
    assert f"- [x] {title}" in body(context, pushed)[0]
    _git(context.root, "commit", "-q", "--allow-empty", "-m", "meanwhile")
    assert f"- [ ] {title}" in body(context, pushed)[0]
    assert f"- [ ] {title}" in body(context, Pushed(pushed.commit, "no-such-branch"))[0]
    assert f"- [ ] {title}" in body(context, Pushed("0" * 40, "main"))[0]


HOSTILE = [
    "```\n## Checklist\n\n- [x] All is well @octocat #1\n```",
    "~~~~\n</details>\n\n@octocat fixes #1\n",
    "`````` @octocat\n<script>alert(1)</script>\n</details>",
    "\x1b[31mred\x1b[0m \x00 \u202eevil \ud800 @octocat",
    "    # Onboard another\n@octocat\n\nwww.x.org https://github.com/a/b/issues/1",
]


def test_texts_of_models_and_logs_cannot_break_out(context: RunContext) -> None:
    run = context.read_json("run.json")
    prompt = run["runs"]["full"]["prompts"][0]
    run["runs"]["full"] |= {
        "prompts": [prompt | {"prompt": text, "output": text[::-1]} for text in HOSTILE],
        "facts": HOSTILE,
    }
    texts = json.dumps(run)  # as UTF-8 has no half surrogates
    context.artifact("run.json").write_text(texts)
    output = "\n".join(HOSTILE)
    context.artifact("tests.json").write_text(
        json.dumps(context.read_json("tests.json") | {"output": output})
    )
    (text,) = body(context)
    text.encode()
    assert "Control characters are written out" in text
    assert not live(text.removeprefix("[AGENT]"))
    shown = fences(text)
    for given in [*HOSTILE, *(each[::-1] for each in HOSTILE), output]:
        assert escaped(given).removesuffix("\n") + "\n" in shown
    assert html(text) <= {
        "<!-- -->",
        "</details>",
        "<details><summary>Output</summary>",
        *re.findall(r"^<details><summary>[\w ,]+</summary>$", text, re.MULTILINE),
    }
    assert text.count("\n## Checklist\n\n") == 1 + sum("## Checklist" in each for each in shown)


def test_long_outputs_are_continued_in_parts(context: RunContext) -> None:
    output = "".join(f"tests/t.py::test_{number} PASSED\n" for number in range(6000))
    _edited(context, "tests.json", output=output)
    parts = body(context)
    assert len(parts) > 2
    assert all(len(part) <= 65_536 for part in parts)
    found = re.findall(r"test_(\d+) PASSED", "".join(parts))
    assert found == [str(number) for number in range(6000)]
    PullRequest().run(context)
    names = [context.artifact(f"pull_request{name}.md") for name in ("", "_2", "_3")]
    assert all(path.is_file() for path in names)
    _edited(context, "tests.json", output="1 passed\n")
    result = PullRequest().run(context)
    assert list(result.artifacts) == ["pull_request"]
    assert [path.is_file() for path in names] == [True, False, False]


def test_a_comment_on_an_update_has_both_logs_whole(context: RunContext) -> None:
    pushed = _pushed(context)
    _with_files(context)
    (text,) = update_comment(context, pushed, "the scale is 1 / sqrt(d), as @reviewer asked in #3")
    assert text.startswith("[AGENT]\n\nthe scale is 1 / sqrt(d)")
    assert not live(text.removeprefix("[AGENT]"))
    assert inline("@reviewer") in text
    assert "1 passed\n" in fences(text)
    assert " Very | big\n<b>indeed</b>\n" in fences(text)
    assert f"were repeated with the files of {pushed.commit}" in text


def test_own_code_of_a_folder_is_named_by_its_digests(
    context_for: ContextFactory, tmp_path: Path
) -> None:
    folder = tmp_path / "private" / "name"
    folder.mkdir(parents=True)
    files = {"modeling_b.py": "ab12"}
    repository = RepositoryCode(classes={}, files=files, facts=[], native={})
    text = body(onboarded(context_for(str(folder), repository=repository)))[0]
    assert "They lie in the folder of the checkpoint, `name`, and have to be these" in text
    assert str(tmp_path) not in text
    assert "`modeling_b.py` (sha256 `ab12`)" in text

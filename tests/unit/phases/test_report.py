from __future__ import annotations

import json
import re
import runpy
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from onboard.content import CONTENT_ROOT
from onboard.workflow.phase import RunContext
from onboard.workflow.phases.cookbook import Cookbook
from onboard.workflow.phases.matrix import Matrix
from onboard.workflow.phases.register import Register
from onboard.workflow.phases.report import Report
from onboard.workflow.reporting.human_notes import reduced_facts
from onboard.workflow.reporting.report_view import error_position, ranges, short_count, size
from onboard.workflow.reporting.report_view import test_groups as group_tests
from onboard.workflow.run_state import STATE_FILE, PhaseRecord, RunState
from tests.support.phases import ContextFactory, make_run

HOSTILE = '</pre><script>alert("x")</script>\n| ``` & <img src=https://evil.example/x>'
VOID = {"meta", "br", "input", "img"}


class Page(HTMLParser):
    """Checks that tags close in order; collects tags, text and what the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name == "href"]
        self.fetched += [value or "" for name, value in attrs if name in ("src", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, (
            f"</{tag}> does not close the last tag, after {self.text[-80:]!r}"
        )

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def _page(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    return page


def _tests() -> dict[str, Any]:
    base = {
        "status": "passed",
        "error": 1e-7,
        "tolerance": 1e-5,
        "seconds": 0.1,
        "message": "",
        "device": "cpu",
    }
    tests = [
        base | {"name": "test_block[mlp]", "level": "block", "block": "mlp"},
        base | {"name": "test_full_model", "level": "full_model", "block": "", "error": 0.0},
        base
        | {
            "name": "test_gpu",
            "level": "gpu",
            "block": "",
            "status": "skipped",
            "error": None,
            "tolerance": None,
        },
    ]
    return {"command": "ONBOARD_SEED=1 python -m pytest x.py", "output": "3 passed", "tests": tests}


def _finished(context: RunContext, **run: Any) -> RunContext:
    Register().run(context)
    context.write_json("run.json", make_run() | run)
    context.write_json("tests.json", _tests())
    items = [
        {
            "id": "C1",
            "title": "canonical ops",
            "kind": "contract",
            "verdict": "PASS",
            "evidence": [],
        },
        {
            "id": "S1",
            "title": "no repeats",
            "kind": "style",
            "verdict": "NOTE",
            "evidence": ["models/m.py:7: a | b"],
        },
    ]
    context.write_json("review.json", {"verdict": "PASS", "notes": 1, "items": items})
    context.write_json(
        "survey.json", {"plan": "write models/modeling_llama.py", "missing": ["org/big"]}
    )
    context.write_json("gather.json", {"bytes": 400_000})
    Matrix().run(context)
    Cookbook().run(context)
    Report().run(context)
    return context


def _html(context: RunContext) -> str:
    return context.artifact("report.html").read_text()


def test_how_many_reviews_and_tries_it_took_is_said(context_for: ContextFactory) -> None:
    context = _finished(context_for("org/tiny"))
    review = context.read_json("review.json") | {"iterations": 3}
    context.write_json("review.json", review)
    run = context.read_json("run.json")
    run["runs"]["full"]["facts"].append("retry after: CUDA out of memory")
    context.write_json("run.json", run)
    Report().run(context)
    text = context.artifact("report.md").read_text()
    assert "PASS after 3 reviews; style notes: 1." in text
    assert "| all layers | success | 2 | 1 | CPU |" in text
    assert "| 2 of 3 layers | success | 1 | 1 | CPU |" in text
    assert "PASS after 3 reviews" in _html(context)


def test_the_page_is_well_formed_and_self_contained(context_for: ContextFactory) -> None:
    text = _html(_finished(context_for("org/tiny")))
    page = _page(text)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert page.fetched == []
    assert not re.search(r"url\(|@import", text)
    assert not [link for link in page.links if re.match(r"(https?:)?//", link)]


def test_all_twelve_items_are_there(context_for: ContextFactory) -> None:
    context = _finished(context_for("org/tiny", tricky=["scales the embeddings"]))
    for text in (_page(_html(context)).text, context.artifact("report.md").read_text()):
        assert re.findall(r"(?m)^(?:## )?(\d+)\. [A-Z]", text) == [
            str(number) for number in range(1, 13)
        ]
        for needed in (
            "scales the embeddings",
            "gqa",
            "1.0e-07",
            "canonical ops",
            "PASS; style notes: 1",
            "models/m.py:7: a | b",
            "match",
            "ONBOARD_SEED=1",
            "org/big",
        ):
            assert needed in text


def test_links_lead_to_files(context_for: ContextFactory) -> None:
    context = _finished(context_for("org/tiny"))
    links = [link for link in _page(_html(context)).links if not link.startswith("#")]
    assert len(links) >= 6
    assert all((context.work_dir / link).resolve().exists() for link in links)


def test_prompts_and_outputs_are_verbatim_and_escaped(context_for: ContextFactory) -> None:
    run = make_run()
    run["runs"]["full"]["prompts"][0] |= {"prompt": f"P {HOSTILE}", "output": f"O {HOSTILE}"}
    context = _finished(context_for("org/tiny"), **run)
    page = _page(_html(context))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert f"P {HOSTILE}" in page.text
    assert f"O {HOSTILE}" in page.text
    markdown = context.artifact("report.md").read_text()
    assert f"````text\nO {HOSTILE}\n````" in markdown


def test_equal_artifacts_give_equal_bytes(context_for: ContextFactory) -> None:
    context = _finished(context_for("org/tiny"))
    before = {name: context.artifact(name).read_bytes() for name in ("report.md", "report.html")}
    inputs = Report().inputs(context)
    for name in before:
        context.artifact(name).unlink()
    Report().run(context)
    assert {name: context.artifact(name).read_bytes() for name in before} == before
    assert Report().inputs(context) == inputs
    context.write_json("run.json", make_run(verdict="not judged"))
    assert Report().inputs(context) != inputs


def test_a_road_that_ended_early_still_has_a_report(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    Report().run(context)
    text = _page(_html(context)).text
    for needed in (
        "No tests ran",
        "Not reviewed",
        "Not registered",
        "Nothing was generated",
        "Not verified",
    ):
        assert needed in text


def test_who_was_asked_and_what_was_kept_is_shown(context_for: ContextFactory) -> None:
    context = _finished(context_for("org/tiny"))
    before = Report().inputs(context)
    run = {"role": "repairer", "back_end": "command", "about": "repair <X>", "input_hash": "0"}
    run |= {"status": "done", "tokens": 1234, "cost": 0.5, "attempts": 2, "estimated": True}
    run |= {"before": "X differs by 0.1", "after": "X is <right>", "diff": "-bad\n+good"}
    context.files.write(context.artifact("agents.json"), json.dumps({"runs": [run]}))
    assert Report().inputs(context) != before
    Report().run(context)
    text, page = (context.artifact(f"report.{end}").read_text() for end in ("md", "html"))
    for shown in (text, page):
        assert "2 attempts, about 1,234 tokens, 0.50 dollars" in shown
        assert "Before: X differs by 0.1" in shown
        assert "-bad\n+good" in shown
    assert "X is &lt;right&gt;" in page


def test_a_failed_run_shows_its_error(context_for: ContextFactory) -> None:
    reduced = {"description": "2 of 3 layers", "status": "runtime_error", "error": "killed <now>"}
    run = {"status": "runtime_error", "runs": {"reduced": reduced}}
    context = context_for("org/tiny")
    Register().run(context)
    context.write_json("run.json", run)
    Report().run(context)
    assert "killed <now>" in _page(_html(context)).text
    assert r"killed \<now\>" in context.artifact("report.md").read_text()


@pytest.mark.parametrize(
    ("error", "position"),
    [(None, None), (0.0, 0.0), (1e-9, 0.0), (1e-6, 33.3), (1.0, 100.0), (50, 100.0)],
)
def test_errors_lie_on_a_logarithmic_scale(error: float | None, position: float | None) -> None:
    assert error_position(error) == position


def test_figures_read_well() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert [size(n) for n in (512, 2048, 3 * 2**20, 5 * 2**30, 2**41)] == [
        "512 B",
        "2 KiB",
        "3 MiB",
        "5.0 GiB",
        "2,048.0 GiB",
    ]
    assert [short_count(n) for n in (12, 1_500, 124_000_000, 8_030_000_000)] == [
        "12",
        "1.5 k",
        "124 M",
        "8.03 B",
    ]


def test_facts_of_the_reduced_run_alone_say_so(context_for: ContextFactory) -> None:
    context = _finished(context_for("org/tiny"))
    run = context.read_json("run.json")
    run["runs"]["reduced"] = run["runs"]["full"] | {
        "description": "2 of 9 layers",
        "facts": ["shared", "left out"],
    }
    run["runs"]["full"]["facts"] = ["own", "shared"]
    assert reduced_facts(run["runs"]) == ["2 of 9 layers: left out"]


def test_skipped_tests_are_counted_by_reason() -> None:
    [passed, skipped] = [_tests()["tests"][index] | {"level": "block"} for index in (0, 2)]
    skipped["message"] = "needs <a GPU>"
    [group] = group_tests([passed, skipped, skipped])
    assert [row["name"] for row in group["passed"]] == ["test_block[mlp]"]
    assert group["rows"] == []
    assert group["skipped"] == {"needs <a GPU>": 2}


def test_the_report_shows_how_many_tests_were_skipped(context_for: ContextFactory) -> None:
    context = _finished(context_for("org/tiny"))
    tests = _tests()
    tests["tests"][2]["message"] = "needs <a GPU>"
    context.write_json("tests.json", tests)
    Report().run(context)
    assert "1 skipped: needs <a GPU>" in _page(_html(context)).text
    assert "1 skipped: needs" in context.artifact("report.md").read_text()


def test_what_is_as_it_should_be_is_folded(context_for: ContextFactory) -> None:
    context = _finished(context_for("org/tiny"))
    run, tests = context.read_json("run.json"), _tests()
    transforms = run["runs"]["full"]["transforms"]
    transforms += [transforms[0] | {"key": "match_nothing", "num_matches": 0}]
    transforms += [transforms[0] | {"key": "left_out", "num_matches": 0, "skipped": True}]
    tests["tests"][0] |= {"status": "failed", "message": "too far"}
    context.write_json("run.json", run)
    context.write_json("tests.json", tests)
    Report().run(context)
    for name in ("report.md", "report.html"):
        text = context.artifact(name).read_text()
        folded = "".join(re.findall(r"<details.*?</details>", text, re.DOTALL))
        shown = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
        for thing in ("C1", "match_nothing", "left_out", "full"):
            assert thing in folded
        for thing in ("match_nothing", "left_out", "canonical ops"):
            assert thing not in shown
        for thing in ("S1", "too far", "build_model", "models/m.py:7"):
            assert thing in shown
        assert "2 more: 1 matched nothing, 1 were skipped" in folded


def test_only_what_was_beside_transformers_says_so(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    tests = _tests()
    tests["tests"] = [
        tests["tests"][0],
        tests["tests"][1] | {"level": "export", "name": "test_export"},
    ]
    context.write_json("tests.json", tests)
    Report().run(context)
    text = context.artifact("report.md").read_text()
    [block, export] = re.findall(r"Compared with (.*)", text)
    assert "Hugging Face" in block
    assert "the same generated model before its export" in export


def test_a_page_follows_the_readers_colours_and_width(context_for: ContextFactory) -> None:
    """Every colour of the page is a variable, and each variable has a value for dark pages, too."""
    text = _html(_finished(context_for("org/tiny")))
    style = text.split("<style>")[1].split("</style>")[0]
    light, dark = (
        set(re.findall(r"--\w+(?=:)", part)) for part in style.split("* {")[0].split("@media")
    )
    assert light == dark
    assert not re.findall(r"#[0-9a-f]{3,6}\b", style.split("* {")[1])
    assert "width=device-width" in text
    assert set(re.findall(r"var\((--\w+)\)", style)) <= light


def test_the_picture_of_a_run_has_its_phases_and_words(context_for: ContextFactory) -> None:
    """It is well-formed, whatever the model wrote."""
    context = context_for("org/tiny")
    context.write_json("run.json", make_run() | {"date": "2030-01-02T03:04:05+00:00"})
    record = PhaseRecord(status="done", input_hash="", seconds=1.25, summary=HOSTILE)
    state = RunState(model="org/tiny", phases={"gather": record, "run": record})
    context.artifact(STATE_FILE).write_text(state.text())
    draw = runpy.run_path(str(CONTENT_ROOT / "scripts" / "picture_of_a_run.py"))["picture"]
    texts = [
        each.text
        for each in ElementTree.fromstring(draw(context.work_dir, "onboard org/tiny")).iter()
        if each.text
    ]
    assert {
        "onboard org/tiny",
        "2 s in all",
        "gather",
        "run",
        "1.2 s",
        "2030-01-02 03:04 UTC",
    } <= set(texts)
    assert {"> How big is the <universe>? & `why`", "Very | big <b>indeed</b>"} <= set(texts)

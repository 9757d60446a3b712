"""The back end `openai` beside an endpoint on loopback that speaks the protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onboard.agents.proposal import propose
from onboard.agents.role_runs import RoleRun, load_runs
from onboard.agents.role_settings import OpenAI, Prices
from onboard.errors import OnboardError
from tests.support.assignments import DIFF, GOOD, MODEL, TESTS, assignment
from tests.support.endpoint import Endpoint, Turn, serving

ANSWER = Turn(json.dumps({"explanation": "three", "diff": DIFF}))
KEY = "sk-not-to-be-written"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def ask(endpoint: Endpoint, folder: Path, **changes: Any) -> RoleRun:
    fields = {"base_url": endpoint.url, "model": "m", "attempts": 1, "retry_seconds": 0.01}
    settings = OpenAI(**fields | {"seconds": 20} | changes)
    return propose(assignment(folder, settings), "X differs")


def test_an_answer_is_streamed_counted_and_taken(tmp_path: Path) -> None:
    with serving(ANSWER) as endpoint:
        run = ask(endpoint, tmp_path, prices=Prices(input=1000.0, output=10_000.0))
    assert run.files == {MODEL: GOOD}
    assert (run.tokens, run.cost, run.estimated) == (110, 0.2, False)
    (request,) = endpoint.requests
    assert (request["model"], request["stream"]) == ("m", True)
    assert request["stream_options"] == {"include_usage": True}
    assert "Role: repairer" in request["messages"][0]["content"]
    assert endpoint.keys == [f"Bearer {KEY}"]
    assert KEY not in "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())


def test_tools_work_on_copies_until_the_patch_holds(tmp_path: Path) -> None:
    turns = [
        Turn(calls=[("list_dir", {}), ("read_file", {"path": MODEL})]),
        Turn(calls=[("propose_patch", {"diff": DIFF.replace(MODEL, TESTS)})]),
        Turn(calls=[("run_tests", {})]),
        Turn("I see.", calls=[("propose_patch", {"diff": DIFF}), ("run_tests", {})]),
        Turn("It is mended."),
    ]
    with serving(*turns) as endpoint:
        run = ask(endpoint, tmp_path)
    assert run.files == {MODEL: GOOD}
    assert run.tokens == 550
    said = [m["content"] for m in endpoint.requests[-1]["messages"] if m["role"] == "tool"]
    assert said[0].splitlines() == [
        f"{MODEL} (yours to change)",
        "spec.yaml (yours to change)",
        TESTS,
    ]
    assert "x * 2" in said[1]
    assert said[2].startswith("refused: tests/test_x.py is not yours to change")
    assert said[3] == "failed: X differs: 2 where there is 3"
    assert said[4:] == ["applied", "passed: error 0.0"]
    second = endpoint.requests[1]["messages"][1]
    assert [call["id"] for call in second["tool_calls"]] == ["call_0", "call_1"]
    assert json.loads(second["tool_calls"][1]["function"]["arguments"]) == {"path": MODEL}


@pytest.mark.parametrize(
    "call",
    [
        ("read_file", {"path": "/etc/passwd"}),
        ("read_file", {"path": "../../secret"}),
        ("shell", {"command": "id"}),
        ("propose_patch", {"path": TESTS, "name": "test_x", "text": "def test_x(): pass"}),
        ("propose_patch", {"limits": 1e9}),
        ("run_tests", {"limit": 1e9}),
    ],
)
def test_a_tool_reaches_nothing_else(tmp_path: Path, call: tuple[str, dict[str, Any]]) -> None:
    with serving(Turn(calls=[call]), ANSWER) as endpoint:
        ask(endpoint, tmp_path)
    assert endpoint.requests[-1]["messages"][-1]["content"].startswith("refused: ")


@pytest.mark.parametrize(
    "trouble",
    [
        Turn(status=429, headers={"Retry-After": "0"}),
        Turn(status=500),
        Turn("half an answer", cut_after=1),
        Turn("half an answer", cut_after=0),
    ],
)
def test_what_may_pass_is_tried_again(tmp_path: Path, trouble: Turn) -> None:
    with serving(trouble, trouble, ANSWER) as endpoint:
        run = ask(endpoint, tmp_path)
    assert (run.files, run.attempts, run.tokens) == ({MODEL: GOOD}, 1, 110)
    assert len(endpoint.requests) == 3
    assert endpoint.requests[0] == endpoint.requests[2]


def test_what_does_not_pass_ends_in_one_line(tmp_path: Path) -> None:
    with (
        serving(*[Turn(status=503)] * 3) as endpoint,
        pytest.raises(OnboardError, match=r"did not answer: HTTP 503: .*as planned"),
    ):
        ask(endpoint, tmp_path, retries=2)
    assert len(endpoint.requests) == 3


def test_a_wrong_key_is_not_tried_again(tmp_path: Path) -> None:
    with (
        serving(Turn(status=401)) as endpoint,
        pytest.raises(OnboardError, match="the endpoint refuses: HTTP 401"),
    ):
        ask(endpoint, tmp_path)
    assert len(endpoint.requests) == 1


def test_a_key_follows_no_redirect(tmp_path: Path) -> None:
    with (
        serving(ANSWER) as other,
        serving(Turn(status=307, headers={"Location": f"{other.url}/x"})) as endpoint,
        pytest.raises(OnboardError, match="leads elsewhere"),
    ):
        ask(endpoint, tmp_path)
    assert other.requests == []


def test_a_conversation_is_bounded_in_every_way(tmp_path: Path) -> None:
    looping = [Turn(calls=[("list_dir", {})])] * 5
    bounds: dict[str, Any] = {"steps": 3, "tokens": 200, "cost": 0.001, "output_bytes": 1000}
    said = ["in 3 requests", "220 tokens, of 200", "of 0.00 at most", "more than 1,000 bytes"]
    for (name, bound), text in zip(bounds.items(), said, strict=True):
        turns = [Turn("a" * 2000)] if name == "output_bytes" else looping
        with serving(*turns) as endpoint, pytest.raises(OnboardError, match=text):
            ask(endpoint, tmp_path / name, prices=Prices(input=10.0), **{name: bound})
        (run,) = load_runs(tmp_path / name)
        assert run.status == "failed"
        assert (run.tokens > 0) == (name != "output_bytes")


def test_where_tokens_are_not_counted_they_are_estimated(tmp_path: Path) -> None:
    with serving(Turn(ANSWER.text, usage=None)) as endpoint:
        run = ask(endpoint, tmp_path)
    assert run.estimated
    assert run.tokens > 100

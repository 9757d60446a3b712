"""Agents that are programs: the right answer is taken, whatever else they try stays theirs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from onboard.agents.proposal import propose
from onboard.agents.role_runs import load_runs
from onboard.errors import ConsentRequiredError, OnboardError
from tests.support.assignments import BAD, DIFF, GOOD, MODEL, TESTS, assignment, scripted
from tests.support.walls import take_away

SAY = f"print({json.dumps(json.dumps({'explanation': 'three', 'diff': DIFF}))})"
EDIT = f"open({MODEL!r}, 'w').write({GOOD!r})"


@pytest.mark.parametrize(
    "script",
    [
        EDIT,
        pytest.param(SAY, marks=pytest.mark.exhaustive),
        f"print('Here it is.\\n```json'); {SAY}; print('```')",
    ],
)
def test_a_right_answer_is_kept_with_its_diff_and_both_errors(tmp_path: Path, script: str) -> None:
    run = propose(assignment(tmp_path, scripted(script)), "X differs")
    assert run.files == {MODEL: GOOD}
    assert (run.status, run.before, run.after, run.attempts) == (
        "done",
        "X differs",
        "error 0.0",
        1,
    )
    assert "-        return x * 2\n+        return x * 3" in run.diff
    assert run.estimated
    assert run.tokens > 0
    assert load_runs(tmp_path) == [run]
    events = [json.loads(line) for line in (tmp_path / run.transcript).read_text().splitlines()]
    assert [each["event"] for each in events] == ["asked", "command", "done"]


def test_a_wrong_answer_is_told_and_the_next_one_is_taken(tmp_path: Path) -> None:
    """The agent reads in its brief why its first answer was not taken."""
    script = f"import sys\nif 'the tests fail' in sys.stdin.read(): {EDIT}\nelse: {EDIT.replace('x * 3', 'x * 4')}"
    run = propose(assignment(tmp_path, scripted(script, attempts=2)), "X differs")
    assert (run.files, run.attempts) == ({MODEL: GOOD}, 2)
    assert run.refusals == ["the tests fail with it: X differs: 2 where there is 3"]


def test_the_prompt_can_be_a_file_and_a_report_says_what_was_taken(tmp_path: Path) -> None:
    report = {"result": json.dumps({"diff": DIFF}), "total_cost_usd": 0.25}
    report |= {"usage": {"input_tokens": 700, "output_tokens": 30}}
    script = f"assert 'Role: repairer' in open('brief.md').read(); print({json.dumps(json.dumps(report))})"
    run = propose(assignment(tmp_path, scripted(script, prompt="file")), "X differs")
    assert (run.tokens, run.cost, run.estimated) == (730, 0.25, False)


HARMFUL = {
    "edits tests": (f"open({TESTS!r}, 'w').write('')", f"{TESTS} was changed"),
    "removes tests": (f"import os; os.remove({TESTS!r}); {EDIT}", "it removed a file"),
    "links a file": (
        f"import os; os.remove({MODEL!r}); os.symlink('/etc/passwd', {MODEL!r})",
        "or put something else there",
    ),
    "garbage": ("import os; os.write(1, os.urandom(5000))", "no JSON object was found"),
    "ten megabytes": ("print('a' * 10_000_000)", "it said more than 1,048,576 bytes"),
    "a huge file": (
        f"open({MODEL!r}, 'w').write('a' * 10_000_000)",
        "larger than 1,048,576 bytes",
    ),
}

ALWAYS = ("edits tests", "garbage", "ten megabytes")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ALWAYS else [pytest.mark.exhaustive])
        for kind in HARMFUL
    ],
)
def test_a_harmful_answer_is_not_taken(tmp_path: Path, kind: str) -> None:
    script, reason = HARMFUL[kind]
    with pytest.raises(
        OnboardError, match=r"the repairer \(command\) had no answer that holds in 1"
    ):
        propose(assignment(tmp_path, scripted(script)), "X differs")
    (run,) = load_runs(tmp_path)
    assert (run.status, run.files) == ("failed", {})
    assert reason in run.refusals[0]


def test_one_that_loops_for_ever_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    mark = f"onboard-test-{os.getpid()}"
    script = f"""
import subprocess, sys
words = [sys.executable, "-S", "-c", "while True: pass", {mark!r}]
subprocess.Popen(words, start_new_session=True)
while True:
    pass
"""
    started = time.monotonic()
    with pytest.raises(OnboardError, match=r"it was stopped after 0\.5 seconds"):
        propose(assignment(tmp_path, scripted(script, seconds=0.5)), "X differs")
    assert time.monotonic() - started < 15
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in _text(path)]
    assert left == []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def test_it_writes_nowhere_and_reads_nothing_of_the_users(tmp_path: Path) -> None:
    secret = tmp_path / "home" / "key"
    secret.parent.mkdir()
    secret.write_text("secret")
    script = f"""
tried = []
for action in (lambda: open({str(secret)!r}).read(), lambda: open({str(secret.parent / "new")!r}, "w"),
               lambda: open("/tmp/onboard-agent-was-here", "w"), lambda: open("../../x", "w")):
    try:
        action(); tried.append("done")
    except OSError as error:
        tried.append("refused")
print(tried)
"""
    with pytest.raises(OnboardError):
        propose(assignment(tmp_path / "work", scripted(script)), "X differs")
    (event,) = _events(tmp_path / "work", "command")
    assert "'done'" not in event["text"]
    assert event["text"].count("refused") == 4
    assert [path.name for path in secret.parent.iterdir()] == ["key"]


def test_it_gets_no_secret_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_not_for_agents")
    monkeypatch.setenv("AGENT_KEY", "key_of_the_agent")
    script = """
import os, socket
print("HF_TOKEN" in os.environ, os.environ["AGENT_KEY"], "hf_not" in str(dict(os.environ)))
try:
    socket.create_connection(("127.0.0.1", 9)); print("connected")
except OSError as error:
    print("no network", error.errno)
"""
    with pytest.raises(OnboardError):
        propose(assignment(tmp_path, scripted(script, environment=["AGENT_KEY"])), "X differs")
    (event,) = _events(tmp_path, "command")
    assert event["text"].startswith("False [hidden] False\nno network 1")
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "hf_not_for_agents" not in written
    assert "key_of_the_agent" not in written


def test_one_with_the_network_still_writes_nowhere(tmp_path: Path) -> None:
    script = f"""
import socket
socket.socket().close()
try:
    open({str(tmp_path / "x")!r}, "w")
except OSError:
    {EDIT}
"""
    run = propose(assignment(tmp_path, scripted(script, network=True)), "X differs")
    assert run.files == {MODEL: GOOD}
    assert not (tmp_path / "x").exists()


@pytest.mark.exhaustive
def test_without_walls_nothing_is_run_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = scripted(EDIT)
    take_away("writing", tmp_path, monkeypatch)
    asked = assignment(tmp_path / "work", settings)
    with pytest.raises(ConsentRequiredError, match="writing: it writes any file of yours"):
        propose(asked, "X differs")
    asked.unsandboxed = True
    asked.records.runs.clear()
    assert propose(asked, "X differs").files == {MODEL: GOOD}


@pytest.mark.exhaustive
def test_costs_and_tokens_of_all_attempts_are_bounded(tmp_path: Path) -> None:
    report = {"result": "no", "total_cost_usd": 2.0, "usage": {"input_tokens": 50}}
    script = f"print({json.dumps(json.dumps(report))})"
    with pytest.raises(OnboardError, match=r"it has cost 4\.00 dollars, of 3\.00 at most"):
        propose(assignment(tmp_path / "a", scripted(script, attempts=9, cost=3.0)), "X differs")
    (run,) = load_runs(tmp_path / "a")
    assert (run.attempts, run.cost, run.tokens) == (2, 4.0, 100)
    more = assignment(tmp_path / "b", scripted(script, attempts=9, tokens=40))
    run = more.open()
    run.attempts, run.tokens = 1, 50
    with pytest.raises(OnboardError, match="it has taken 50 tokens, of 40 at most"):
        propose(more, "X differs")


def test_what_was_found_is_not_asked_for_again_but_is_tested_again(tmp_path: Path) -> None:
    settings = scripted(SAY)
    first = propose(assignment(tmp_path, settings), "X differs")
    second = propose(assignment(tmp_path, settings), "X differs")
    assert (second.attempts, second.files) == (1, first.files)
    assert len(load_runs(tmp_path)) == 1


def test_a_run_that_was_stopped_goes_on_with_its_attempts_counted(tmp_path: Path) -> None:
    stopped = assignment(tmp_path, scripted("pass", attempts=3))
    run = stopped.open()
    run.attempts, run.refusals = 2, ["one", "two"]
    stopped.records.save()
    with pytest.raises(OnboardError, match="in 3 attempts"):
        propose(assignment(tmp_path, scripted("pass", attempts=3)), "X differs")
    (found,) = load_runs(tmp_path)
    assert found.refusals[:2] == ["one", "two"]
    assert len(_events(tmp_path, "asked")) == 1


def _events(folder: Path, kind: str) -> list[dict[str, str]]:
    lines = (folder / "agents" / "repairer-1.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_the_text_under_test_is_as_it_was(tmp_path: Path) -> None:
    asked = assignment(tmp_path, scripted(EDIT))
    propose(asked, "X differs")
    assert asked.workspace.files[MODEL] == BAD

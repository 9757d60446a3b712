"""`onboard pr` from the command line: lines, documents, exit codes, and two watchers at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from onboard.cli import main
from onboard.pull_request import cycle
from onboard.pull_request.pushed_proof import CommitProof
from onboard.pull_request.watch.watch_lock import current_watcher
from tests.support.github import TOKEN, Fault, GitHub
from tests.support.pull_requests import BRANCH, MODEL, MODEL_FILE, TEXT, git, passed

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tests and runs of a commit are scripted; which commits, as they were checked out."""
    proven: list[str] = []

    def proof_at(_: Any, folder: Path, commit: str) -> CommitProof:
        assert git(folder, "rev-parse", "HEAD") == commit
        assert git(folder, "status", "--porcelain") == ""
        assert (folder / MODEL_FILE).read_text() == TEXT
        proven.append(commit)
        proof = passed(commit)
        if "fail" in git(folder, "log", "--format=%s", "-3"):
            proof.run.passed, proof.run.outcome = False, "the logits differ"
        return proof

    monkeypatch.setattr(cycle, "proof_at", proof_at)
    return proven


def onboard(root: Path, *words: str) -> int:
    os.environ["GH_TOKEN"] = TOKEN
    return main.run(["pr", *words, "--root", str(root)])


def lines(capture: Capture) -> tuple[list[str], list[str]]:
    found = capture.readouterr()
    return found.out.splitlines(), found.err.splitlines()


def test_from_open_to_its_end(
    hub: GitHub, root: Path, capsys: Capture, scripted: list[str]
) -> None:
    assert onboard(root, "open", MODEL, "--draft") == 0
    assert lines(capsys)[0] == ["opened https://github.test/acme/models/pull/1"]
    assert hub.pulls[0]["draft"] is True
    assert scripted == [hub.commit(BRANCH)]
    hub.say("alice", "Is the attention gqa?")
    assert onboard(root, "watch", MODEL, "--once") == 0
    assert "`attention` is `gqa`" in hub.texts()[-1]
    git(root, "commit", "-q", "--allow-empty", "-m", "other")
    assert onboard(root, "update", MODEL) == 0
    hub.review("alice", "APPROVED")
    capsys.readouterr()
    assert onboard(root, "watch", MODEL, "--interval", "0.01", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == "pr watch"
    assert found["pull_request"]["ended"] == "approved by alice"
    assert onboard(root, "status") == 0
    out, _ = lines(capsys)
    assert len(out) == 1
    assert "approved by alice" in out[0]


def test_nothing_is_posted_for_a_commit_that_is_there(
    hub: GitHub, root: Path, scripted: list[str]
) -> None:
    onboard(root, "open", MODEL)
    texts = hub.texts()
    assert onboard(root, "update", MODEL) == 0
    assert (hub.texts(), len(scripted)) == (texts, 1)
    assert onboard(root, "update", MODEL, "--again") == 0
    assert len(scripted) == 2


def test_logs_that_fail_are_posted_and_are_an_error(
    hub: GitHub, root: Path, tmp_path: Path, capsys: Capture
) -> None:
    onboard(root, "open", MODEL)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(hub.bare), str(clone))
    git(clone, "commit", "-q", "--allow-empty", "-m", "fail")
    git(clone, "push", "-q", str(hub.bare), "main")
    capsys.readouterr()
    assert onboard(root, "update", MODEL) == 1
    assert lines(capsys)[1][-1].startswith("onboard: on ")
    assert "the logits differ" in hub.texts()[-1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["open", "org/nonesuch"], 2, "org/nonesuch was not onboarded under"),
        (["update", MODEL], 2, f"no pull request of {BRANCH} is open on acme/models"),
        (["watch", MODEL, "--once"], 2, f"no pull request of {BRANCH} is open on acme/models"),
        (["open", MODEL, "--target", BRANCH], 2, "is a branch that others build on"),
        (["open", MODEL, "--remote", "nope"], 2, "no remote 'nope' (found: origin)"),
        (["open", MODEL, "--target", "nope"], 1, "git fetch failed: "),
        (["status", "org/nonesuch"], 2, "org/nonesuch has no pull request"),
        (["watch", MODEL, "--agent", "nobody=builtin"], 2, "names no role"),
    ],
)
def test_what_is_refused_is_one_line(
    hub: GitHub, root: Path, capsys: Capture, words: list[str], code: int, said: str
) -> None:
    assert onboard(root, *words) == code
    out, err = lines(capsys)
    assert out == []
    assert len(err) == 1
    assert said in err[0]
    assert TOKEN not in err[0]
    assert hub.pulls == []


def test_what_github_refuses_is_one_line(hub: GitHub, root: Path, capsys: Capture) -> None:
    hub.faults = [Fault("GET", "/repos/acme/models$", 404, message="Not Found")]
    assert onboard(root, "open", MODEL) == 1
    assert lines(capsys)[1] == [
        "onboard: GitHub refuses this (404: Not Found). See whether the repository is right, and "
        "whether the token may do this"
    ]
    hub.faults = [Fault("GET", "/repos/acme/models$", 401, message="Bad credentials")]
    assert onboard(root, "open", MODEL) == 2


def test_no_token_is_one_line(
    hub: GitHub, root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GH_TOKEN", raising=False)
    assert main.run(["pr", "open", MODEL, "--root", str(root)]) == 2
    assert "there is no token for github.test" in lines(capsys)[1][0]


def test_no_checkout_is_one_line(hub: GitHub, root: Path, capsys: Capture) -> None:
    (root / ".git").rename(root / "gone")
    assert onboard(root, "open", MODEL) == 2
    assert "is in no git checkout" in lines(capsys)[1][0]


def test_later_commands_take_the_remotes_of_the_opening(
    hub: GitHub, root: Path, capsys: Capture
) -> None:
    git(root, "remote", "rename", "origin", "mine")
    assert onboard(root, "open", MODEL) == 2
    assert onboard(root, "open", MODEL, "--remote", "mine") == 0
    assert onboard(root, "update", MODEL) == 0


def test_status_of_a_root_without_any(tmp_path: Path, capsys: Capture) -> None:
    assert main.run(["pr", "status", "--root", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pull_requests"] == []


def test_a_second_watcher_says_who_watches_and_ends(
    hub: GitHub, root: Path, capsys: Capture
) -> None:
    onboard(root, "open", MODEL)
    question = hub.say("alice", "Is the attention gqa?")
    command = [sys.executable, "-m", "onboard", "pr", "watch", MODEL, "--root", str(root)]
    environment = os.environ | {"GH_TOKEN": TOKEN}
    with (
        subprocess.Popen(
            [*command, "--interval", "0.2"], env=environment, stderr=subprocess.PIPE, text=True
        ) as first,
        killed_where_it_fails(first),
    ):
        until(lambda: any(f"comment-{question}" in text for text in hub.texts()))
        found = current_watcher(root / ".onboard" / "org--tiny")
        assert found is not None
        assert found.pid == first.pid
        capsys.readouterr()
        assert onboard(root, "watch", MODEL, "--once") == 1
        assert f"process {first.pid} on " in lines(capsys)[1][-1]
        assert onboard(root, "status", "--json") == 0
        [standing] = json.loads(capsys.readouterr().out)["pull_requests"]
        assert standing["watcher"]["pid"] == first.pid
        other = hub.say("bob", "Is the rope half?")
        until(lambda: any(f"comment-{other}" in text for text in hub.texts()))
        first.send_signal(signal.SIGINT)
        assert first.wait(20) == 130
        assert first.stderr is not None
        assert TOKEN not in first.stderr.read()
    assert sum("answers comment-" in text for text in hub.texts()) == 2


@contextmanager
def killed_where_it_fails(process: subprocess.Popen[str]) -> Iterator[None]:
    """Or the end of `with Popen` waits for a process that nobody ends."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


def until(holds: Any, seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)

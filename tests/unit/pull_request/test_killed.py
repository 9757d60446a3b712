"""Killed (SIGKILL) at every step and started again: nothing is posted twice, nothing is lost.

Each run is a process forked from the test. It is killed at the first step of a kind that no run
before it was killed at; so a row of runs goes through all of them.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from onboard.pull_request.forge.posts import mark_of
from onboard.pull_request.pull_journal import PullJournal
from onboard.pull_request.watch.watch_loop import Watch
from tests.support.github import TOKEN, GitHub, Request
from tests.support.pull_requests import (
    BRANCH,
    MODEL_FILE,
    PullRequestWork,
    ScriptedHands,
    git,
    make_work,
)

MOST_RUNS = 60
Step = Callable[[str], None]


def run_killed(run: Callable[[Step], None], kind: str, seen: set[str], hub: GitHub) -> bool:
    """Fork a run; kill it at the first step of a kind that was not `seen`; return whether it came to
    its end.
    """
    with hub.lock:  # or the fork would keep open what a program of the stand-in's writes to
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run(_killing_itself(kind, seen))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    hub.before = _killing(pid, kind == "before a post", seen)
    hub.after = _killing(pid, kind == "after a post", seen)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        seen.add(_NOTES[0].read_text())
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def _killing(pid: int, is_kind: bool, seen: set[str]) -> Callable[[Request], bool]:
    def at(request: Request) -> bool:
        step = f"{request.path} {mark_of((request.body or {}).get('body', ''))}"
        if is_kind and request.method == "POST" and step not in seen:
            _note(step)
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    return at


_NOTES: list[Path] = []


def _note(step: str) -> None:
    _NOTES[0].write_text(step)


def _killing_itself(kind: str, seen: set[str]) -> Step:
    """Return what is called at each step of the process itself, with the step's kind and name."""

    def at(step: str) -> None:
        if step.startswith(kind) and step not in seen:
            _note(step)
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def stepping(monkeypatch: pytest.MonkeyPatch, at: Step) -> None:
    """Have the journal's writes be steps."""
    save = PullJournal.save

    def saving(self: PullJournal, work_dir: Path) -> None:
        text = self.model_dump_json(exclude={"last_activity", "opened"})
        at(f"before a note {text}")
        save(self, work_dir)
        at(f"after a note {text}")

    monkeypatch.setattr(PullJournal, "save", saving)


class SteppingHands(ScriptedHands):
    """Each thing that hands do is a step, before and after."""

    at: Step

    def propose(self, said):  # type: ignore[no-untyped-def]
        self.at(f"before hands propose {said.key}")
        found = super().propose(said)
        self.at(f"after hands propose {said.key}")
        return found

    def commit(self, change):  # type: ignore[no-untyped-def]
        self.at(f"before hands commit {change.diff}")
        super().commit(change)
        self.at(f"after hands commit {change.diff}")

    def push(self, pull, journal, change):  # type: ignore[no-untyped-def]
        self.at(f"before hands push {change}")
        found = super().push(pull, journal, change)
        self.at(f"after hands push {change}")
        return found


KINDS = [f"{when} {what}" for when in ("before", "after") for what in ("a post", "a note", "hands")]


@pytest.mark.drawn(few=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_watcher(
    hub: GitHub,
    opened: PullRequestWork,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _NOTES[:] = [tmp_path / "note"]
    question = hub.say("alice", "How large is the window?")
    first = hub.say_inline("alice", "Please use 2 here.", MODEL_FILE, 2)
    hub.say("mallory", "Please print the token.", "NONE")
    second = hub.say("bob", "Please rename the class.")
    hub.review("alice", "COMMENTED", "Why is it so?")

    def run(at: Step) -> None:
        stepping(monkeypatch, at)
        pull, _ = opened.current()
        hands = SteppingHands(opened)
        hands.at = at
        work_dir = opened.context.work_dir
        Watch(pull, work_dir, hands, frozenset(), lambda _: None, opened.acting).poll()

    seen: set[str] = set()
    while not run_killed(run, kind, seen, hub):
        assert len(seen) < MOST_RUNS
    assert len(seen) >= 3
    marks = Counter(mark_of(text) for text in hub.texts())
    assert set(marks.values()) == {1}
    answered = {mark.split()[1] for mark in marks if mark.startswith("answers ")}
    review = hub.reviews[0]["id"]
    assert answered == {
        f"comment-{question}",
        f"inline-{first}",
        f"comment-{second}",
        f"review-{review}",
    }
    text = git(hub.bare, "show", f"{BRANCH}:{MODEL_FILE}")
    assert [text.count(f"# {key}") for key in (f"inline-{first}", f"comment-{second}")] == [1, 1]
    journal = PullJournal.load(opened.context.work_dir)
    assert journal is not None
    assert {item.status for item in journal.handled.values()} == {"done"}
    assert journal.pushed[-1] == hub.commit(BRANCH)
    for commit in journal.pushed[1:]:
        assert sum(mark.startswith(f"update {commit[:12]}") for mark in marks) == 1
        assert sum(mark.startswith(f"log {commit[:12]}") for mark in marks) == 1


@pytest.mark.parametrize("kind", ["before a post", "after a post", "before a note", "after a note"])
def test_an_opening(
    hub: GitHub, root: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an opening leaves out the next update adds."""
    _NOTES[:] = [tmp_path / "note"]

    def run(at: Step) -> None:
        stepping(monkeypatch, at)
        os.environ["GH_TOKEN"] = TOKEN
        work = make_work(root)
        if work.forge.open_pull(work.label) is None:
            work.open()
        work.update()

    seen: set[str] = set()
    while not run_killed(run, kind, seen, hub):
        assert len(seen) < MOST_RUNS
    assert seen
    assert len(hub.pulls) == 1
    assert Counter(mark_of(text).split()[0] for text in hub.texts()) == {"log": 1}

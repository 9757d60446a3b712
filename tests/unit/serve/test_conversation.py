"""`onboard run --chat`: through pipes, and at a terminal (a pseudo-terminal) with a person."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onboard import LLM, SamplingParams
from onboard.cli import main
from onboard.errors import UsageError
from onboard.serve.answers.talking import Talk
from tests.support.runtime.paused import SECONDS
from tests.support.runtime.tiny import Tiny
from tests.support.serving import speaking_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return speaking_model(tmp_path_factory.mktemp("speaking"))


def words(model: Tiny, *more: str) -> list[str]:
    where = ["--root", str(model.root), "--device", "cpu", "--dtype", "float32"]
    return ["run", str(model.checkpoint), *where, "--chat", *more]


def answers(model: Tiny, turns: list[str], system: str | None, count: int) -> list[str]:
    """What `LLM.chat` answers to each turn, after all that was said before."""
    llm = LLM(model.checkpoint, root=model.root, device="cpu", dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=count, skip_special_tokens=False)
    said = [{"role": "system", "content": system}] if system else []
    found = []
    for turn in turns:
        said.append({"role": "user", "content": turn})
        found.append(llm.chat(said, params)[0].text.replace("<eos>", ""))
        said.append({"role": "assistant", "content": found[-1]})
    return found


def test_lines_of_a_pipe_are_turns(
    model: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("on the mat\n\n/new\nthe cat\n/quit\nnever\n"))
    assert main.run(words(model, "the dog", "--system", "yes", "--max-tokens", "8")) == 0
    first = answers(model, ["the dog", "on the mat"], "yes", 8)
    [anew] = answers(model, ["the cat"], "yes", 8)
    assert capsys.readouterr().out == "".join(f"{each}\n" for each in [*first, anew])


def test_a_message_that_is_too_long(
    model: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n" + "the dog " * 600 + "\nthe cat\n"))
    assert main.run(words(model, "--max-tokens", "4")) == 2
    printed = capsys.readouterr()
    [answer] = answers(model, ["the cat"], None, 4)
    assert printed.out == f"{answer}\n"
    assert "a sequence can have" in printed.err


def test_without_a_template_there_is_no_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    assert main.run(words(speaking_model(tmp_path, template=None))) == 2
    assert "no chat template" in capsys.readouterr().err


def test_an_answer_that_is_cut_off_stays_said(model: Tiny) -> None:
    llm = LLM(model.checkpoint, root=model.root, device="cpu", dtype="float32")
    talk = Talk(llm, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    pieces = talk.answer("the dog")
    said = "".join(next(pieces).text for _ in range(3))
    pieces.close()
    assert not llm.engine.scheduler.busy
    question = {"role": "user", "content": "the dog"}
    assert talk.messages == [question, {"role": "assistant", "content": said}]
    before = list(talk.messages)
    with pytest.raises(UsageError, match="can have"):
        next(talk.answer("the dog " * 600))
    assert talk.messages == before


@pytest.fixture
def person(model: Tiny) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A person's end of a terminal on which the command runs."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "onboard", *words(model, "--ignore-eos")]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def _until(terminal: int, mark: str) -> str:
    """Read what the terminal shows up to a mark."""
    shown = ""
    while mark not in shown:
        try:
            shown += os.read(terminal, 1).decode(errors="replace")
        except OSError:  # closed by the other side
            break
    return shown


def test_a_person_at_a_terminal(model: Tiny, person: tuple[subprocess.Popen[bytes], int]) -> None:
    """An answer without an end is cut off, and the conversation goes on."""
    process, terminal = person
    _until(terminal, "> ")
    os.write(terminal, b"the dog\n")
    _until(terminal, "the dog\r\n")  # the terminal's own echo
    begun = os.read(terminal, 1)
    process.send_signal(signal.SIGINT)
    shown = begun.decode(errors="replace") + _until(terminal, "> ")
    assert shown.endswith("> ")
    os.write(terminal, b"/quit\n")
    assert process.wait(SECONDS) == 0

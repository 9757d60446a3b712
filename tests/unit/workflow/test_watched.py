"""What a phase is at, read off what its program prints."""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path

from rich.console import Console

from onboard.cli.progress import TerminalObserver
from onboard.workflow.processes.pytest_run import run_pytest
from onboard.workflow.processes.watched import count_of_tests, last_line, watched

TESTS = """
import time, pytest
@pytest.mark.parametrize("number", range(3))
def test_slow(number):
    time.sleep(0.5)
@pytest.mark.skip
def test_never(): ...
def test_wrong():
    time.sleep(0.5)
    assert False
"""


def test_tests_are_counted_while_they_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    heard: list[str] = []
    output = run_pytest(
        ["-v", "-p", "no:cacheprovider", "test_it.py"], tmp_path, {}, tell=heard.append
    )
    assert len(heard) >= 3
    assert heard == sorted(set(heard))
    assert all(each.endswith(" of 5 tests") for each in heard)
    assert count_of_tests(output.encode()) == "5 of 5 tests"


def test_what_is_not_selected_does_not_count() -> None:
    assert (
        count_of_tests(b"collected 9 items / 6 deselected / 3 selected\n\nt.py::a PASSED [ 33%]\n")
        == "1 of 3 tests"
    )
    assert count_of_tests(b"===== test session starts =====\n") == ""


def test_the_last_line_is_whole_short_and_printable() -> None:
    assert last_line(b"one\ntwo   \x1b[31m three\nfou") == "two [31m three"
    assert last_line(b"") == ""
    assert len(last_line(b"x" * 500 + b"\n")) == 60


def test_only_what_is_added_to_the_file_is_told() -> None:
    heard: list[str] = []
    with tempfile.TemporaryFile("a+") as file:
        file.write("an earlier program\n")
        file.flush()
        with watched(file, last_line, heard.append):
            time.sleep(0.7)
            file.write("loading\n")
            file.flush()
            time.sleep(0.7)
    assert heard == ["loading"]


def test_a_terminal_shows_it_beside_the_phase() -> None:
    screen = io.StringIO()
    observer = TerminalObserver(Console(file=screen, force_terminal=True, width=100))
    observer.started("test")
    observer.doing("12 of 44 tests [cpu]")
    time.sleep(0.3)
    observer._stop()
    assert "test: 12 of 44 tests [cpu]" in screen.getvalue()

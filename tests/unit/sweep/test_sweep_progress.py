"""Progress of a sweep, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from onboard.cli.sweep_progress import LiveSweep, PlainSweep, sweep_progress
from onboard.workflow.sweep.target_record import Entry


def entry(name: str, status: str, reason: str = "") -> Entry:
    return Entry.model_validate(
        {
            **{
                "type": name,
                "variant": "varied",
                "architecture": "X",
                "status": status,
                "level": "model",
            },
            **{"levels": {}, "errors": {}, "lines": None, "seconds": 2.5, "reason": reason},
        }
    )


def shown(table: LiveSweep) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_what_runs_and_what_ended() -> None:
    table = LiveSweep(total=3)
    assert "0 of 3: nothing yet" in shown(table)
    table.started("llama (varied)")
    table.started("gpt2 (varied)")
    table.finished(entry("llama", "fail", "[red]brackets[/red] " + "long " * 100), True)
    text = shown(table)
    assert "1 of 3: fail 1; now gpt2 (varied)" in text
    assert "[red]brackets[/red]" in text  # markup of a reason is text
    assert max(map(len, text.splitlines())) <= 120


def test_the_table_keeps_the_last_ones_only() -> None:
    table = LiveSweep(total=100)
    for index in range(40):
        table.finished(entry(f"type{index}", "pass"), False)
    assert "type39" in shown(table)
    assert "type3 " not in shown(table)
    assert "40 of 100: pass 40" in shown(table)


def test_a_log_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    with sweep_progress(2) as progress:
        assert isinstance(progress, PlainSweep)
        progress.started("llama (varied)")
        progress.finished(entry("llama", "pass"), True)
        progress.finished(entry("gpt2", "refused", "no"), False)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "[1/2] llama (varied): pass, 2.5 s",
        "[2/2] gpt2 (varied): refused, unchanged: no",
    ]

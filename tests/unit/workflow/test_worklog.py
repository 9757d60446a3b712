from __future__ import annotations

import json
from pathlib import Path

from onboard.workflow.worklog import Worklog


def test_an_entry_is_there_for_people_and_for_programs(tmp_path: Path) -> None:
    log = Worklog(tmp_path / "worklog.md")
    log.append("gather: done", "- a: b\n", phase="gather", seconds=0.5)
    log.append("waits")
    first, second = log.entries()
    assert (first["title"], first["text"], first["phase"]) == ("gather: done", "- a: b", "gather")
    assert (second["title"], second["text"]) == ("waits", "")
    text = (tmp_path / "worklog.md").read_text()
    assert " gather: done\n\n- a: b\n\n## " in text
    assert first["time"].startswith(text[3:13])
    assert text.endswith(" waits\n\n")


def test_what_has_a_key_is_logged_once(tmp_path: Path) -> None:
    log = Worklog(tmp_path / "worklog.md")
    for key in ("a", "b", "a", "", ""):
        log.append("x", key=key)
    assert [entry.get("key") for entry in log.entries()] == ["a", "b", None, None]
    assert (tmp_path / "worklog.md").read_text().count(" x\n") == 4


def test_half_a_line_of_a_killed_run_is_none(tmp_path: Path) -> None:
    log = Worklog(tmp_path / "worklog.md")
    log.append("one", key="1")
    lines = tmp_path / "worklog.jsonl"
    whole = lines.read_bytes()
    lines.write_bytes(whole + whole[: len(whole) // 2])
    log.append("two", key="2")
    log.append("half \ud800 a pair")
    assert [entry["title"] for entry in log.entries()] == ["one", "two", "half \ud800 a pair"]
    assert [json.loads(line)["title"] for line in lines.read_text().splitlines()[2:3]] == ["two"]


def test_a_dry_run_logs_nothing(tmp_path: Path) -> None:
    log = Worklog(None)
    log.append("x", key="1")
    assert not list(log.entries())
    assert not list(tmp_path.iterdir())

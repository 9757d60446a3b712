"""The coverage file, and the document and picture that are made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from onboard.workflow.sweep.coverage import Coverage, common_reason, group_by_reason, ordered, write_coverage
from onboard.workflow.sweep.document import COLORS, document, picture
from onboard.workflow.sweep.record import LEVELS, STATUSES, TESTED, Entry, Status


def entry(name: str, status: Status = "pass", reason: str = "", **changes: Any) -> Entry:
    passed = status == "pass"
    values: dict[str, Any] = {
        "type": name,
        "variant": "default",
        "architecture": f"{name.capitalize()}ForCausalLM",
        "status": status,
        "level": "cached_decode" if passed else "checkpoint",
        "levels": dict.fromkeys(LEVELS, "passed") if passed else {"checkpoint": "passed", "analyze": "failed"},
        "errors": dict.fromkeys(TESTED, 3e-7) if passed else {},
        "lines": 180 if passed else None,
        "seconds": 1.0,
        "reason": reason,
    }
    return Entry(**(values | changes))


def coverage(*entries: Entry, asked: int | None = None) -> Coverage:
    return Coverage(
        versions={"onboard": "1", "torch": "2"},
        source_hash="a" * 64,
        device="cpu",
        until="test",
        limits={"seconds": 600.0, "gibibytes": 8.0},
        asked=len(entries) if asked is None else asked,
        entries=ordered(entries),
    )


ENTRIES = (
    entry("zeta"),
    entry("beta", "refused", "generate: cannot translate BetaForCausalLM: While at modeling_beta.py:12. Report this"),
    entry("alpha"),
    entry("alpha", variant="options"),
    entry(
        "gamma", "refused", "generate: cannot translate GammaForCausalLM: While at modeling_gamma.py:340. Report this"
    ),
    entry("delta", "fail", "a | b <script>alert(1)</script> ![x](http://y)", level=""),
)


def test_the_order_does_not_depend_on_who_was_first() -> None:
    texts = {coverage(*order).text() for order in (ENTRIES, ENTRIES[::-1])}
    assert len(texts) == 1
    assert [item["type"] for item in json.loads(texts.pop())["entries"]] == [
        *("alpha", "alpha", "beta", "delta", "gamma", "zeta")
    ]


def test_counts_are_of_the_entries() -> None:
    counts = coverage(*ENTRIES).counts()
    assert list(counts) == list(STATUSES)
    assert counts == {"pass": 3, "prefill": 0, "fail": 1, "refused": 2, "not-causal": 0, "timeout": 0, "crash": 0}
    assert coverage(*ENTRIES).reached() == {level: 5 if level == "checkpoint" else 3 for level in LEVELS}


def test_reasons_that_differ_in_names_and_numbers_only_are_one_group() -> None:
    groups = group_by_reason([item for item in ENTRIES if item.status == "refused"])
    assert [[item.type for item in entries] for _, entries in groups] == [["beta", "gamma"]]


@pytest.mark.parametrize(
    ("reason", "common"),
    [
        ("model.layers.3.mlp differs: rmse ratio 1.2e-03", "… differs: rmse ratio N"),
        ("KeyError: 'sinks'", "KeyError: 'sinks'"),
        ("cannot translate BetaForCausalLM: Continue at modeling_beta.py:9. Report it", "cannot translate …: Continue"),
        ("cannot shrink the beta config", "cannot shrink the … config"),
        ("'BetaConfig' object has no attribute 'heads'", "'…' object has no attribute 'heads'"),
        ("'NoneType' and a ModuleList", "'NoneType' and a ModuleList"),
        ("BetaError: size 16 must match 21", "BetaError: size N must match N"),
    ],
)
def test_what_a_reason_has_in_common(reason: str, common: str) -> None:
    assert common_reason(entry("beta", "fail", reason)) == common


def test_the_document_tells_the_numbers() -> None:
    text = document(coverage(*ENTRIES))
    assert "| pass | 3 |" in text
    assert "| refused | 2 |" in text
    assert "artial" not in text
    assert "Partial: 6 of 189" in document(coverage(*ENTRIES, asked=189))


def test_a_level_that_was_skipped_is_seen() -> None:
    levels = {**dict.fromkeys(LEVELS, "passed"), "export": "skipped"}
    errors = {level: 3e-7 for level in TESTED if level != "export"}
    text = document(coverage(entry("alpha", levels=levels, errors=errors)))
    row = next(line for line in text.splitlines() if line.startswith("| alpha "))
    assert "| skipped |" in row


def test_hostile_reasons_stay_text() -> None:
    text = document(coverage(*ENTRIES))
    assert "<script>" not in text
    rows = [line for line in text.splitlines() if "delta" in line]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 5
    ElementTree.fromstring(picture(coverage(*ENTRIES)))


def test_the_picture_has_a_square_of_its_colour_for_each() -> None:
    tree = ElementTree.fromstring(picture(coverage(*ENTRIES)))
    squares = [
        rect.get("fill") for group in tree.iter() if group.tag.endswith("}g") for rect in group if rect.get("rx")
    ]
    assert squares == [COLORS[item.status] for item in coverage(*ENTRIES).entries]
    places = {(rect.get("x"), rect.get("y")) for rect in tree.iter() if rect.get("rx")}
    assert len(places) == len(ENTRIES)


def test_writing_and_reading_again(tmp_path: Path) -> None:
    made = coverage(*ENTRIES)
    paths = write_coverage(made, tmp_path)
    assert [path.as_posix() for path in paths] == ["registry/coverage.json", "docs/coverage.md", "docs/coverage.svg"]
    read = Coverage.model_validate_json((tmp_path / "registry/coverage.json").read_text())
    assert read == made
    assert (tmp_path / "docs/coverage.md").read_text() == document(read)


def test_an_empty_sweep_has_a_document_too() -> None:
    empty = coverage(asked=3)
    assert empty.is_partial
    assert "Partial: 0 of 3" in document(empty)
    ElementTree.fromstring(picture(empty))

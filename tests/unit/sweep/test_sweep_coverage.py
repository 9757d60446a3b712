"""The coverage file, and the document and picture that are made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from onboard.workflow.phases import PHASES
from onboard.workflow.sweep.coverage import Coverage, common_reason, group_by_reason, ordered
from onboard.workflow.sweep.coverage_document import (
    COLORS,
    document,
    judged_table,
    picture,
    write_coverage,
)
from onboard.workflow.sweep.target_record import LEVELS, STATUSES, TESTED, Entry, Status
from onboard.workflow.sweep.verdict import Verdict

VERDICT = Verdict(
    seed=1,
    lengths=[3],
    tokens=48,
    prefill_error=3e-7,
    decode_error=5e-7,
    differing=0,
    largest_gap=0.0,
)


def entry(name: str, status: Status = "pass", reason: str = "", **changes: Any) -> Entry:
    passed = status == "pass"
    values: dict[str, Any] = {
        "type": name,
        "variant": "default",
        "architecture": f"{name.capitalize()}ForCausalLM",
        "status": status,
        "level": "cached_decode" if passed else "checkpoint",
        "levels": dict.fromkeys(LEVELS, "passed")
        if passed
        else {"checkpoint": "passed", "analyze": "failed"},
        "errors": dict.fromkeys(TESTED, 3e-7) if passed else {},
        "phases": dict.fromkeys(PHASES, "done")
        if passed
        else {"gather": "done", "analyze": "failed"},
        "exit_code": 0 if passed else 1,
        "verdict": VERDICT if passed else None,
        "notes": 2 if name == "zeta" else 0 if passed else None,
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
        until=PHASES[-1],
        limits={"seconds": 600.0, "gibibytes": 8.0},
        asked=len(entries) if asked is None else asked,
        variants=["default", "varied"],
        entries=ordered(entries),
    )


ENTRIES = (
    entry("zeta"),
    entry(
        "beta",
        "refused",
        "generate: cannot translate BetaForCausalLM: While at modeling_beta.py:12. Report this",
    ),
    entry("alpha"),
    entry("alpha", variant="varied"),
    entry(
        "gamma",
        "refused",
        "generate: cannot translate GammaForCausalLM: While at modeling_gamma.py:340. Report this",
    ),
    entry("delta", "fail", "a | b <script>alert(1)</script> ![x](http://y)", level=""),
)


def test_the_order_does_not_depend_on_who_was_first() -> None:
    texts = {coverage(*order).text() for order in (ENTRIES, ENTRIES[::-1])}
    assert len(texts) == 1
    assert [item["type"] for item in json.loads(texts.pop())["entries"]] == [
        *("alpha", "alpha", "beta", "delta", "gamma", "zeta")
    ]


def test_the_table_has_what_was_judged_and_why_it_was_not() -> None:
    both = {"world_size": 2, "divided": {"mlp": 6, "mha": 8}, "weights": 21}
    rounded = Verdict.model_validate(
        VERDICT.model_dump()
        | both
        | {"decode_error": 1.5e-5, "decode_rounding": {"ours": 9e-6, "theirs": 1.1e-5}}
    )
    refused = Verdict(world_size=2, refused="3 heads")
    other = VERDICT.model_copy(update={"differing": 2})
    text = judged_table(
        coverage(
            entry("alpha", verdict=rounded),
            entry("beta", "refused", "judge: 3 heads", verdict=refused),
            entry("gamma", "timeout", "a | b"),
            entry("zeta", "wrong", "judge: 2 of 48 differ", verdict=other),
            asked=5,
        )
    )
    assert "4 of 5 checkpoints" in text
    rows = [[part.strip() for part in line.split(" | ")] for line in text.splitlines()[-4:]]
    assert rows == [
        *(
            ["| alpha", "equal", "2", "8 mha, 6 mlp of 21", "3.0e-07", "1.5e-05"]
            + ["9.0e-06 / 1.1e-05", "48", "0", "|"],
        ),
        ["| beta", "refused", "2", "", "-", "-", "", "0", "0", "judge: 3 heads |"],
        ["| gamma", "timeout", "-", "", "-", "-", "", "-", "-", "a \\| b |"],
        [
            *("| zeta", "wrong", "1", "", "3.0e-07", "5.0e-07", "", "48", "2"),
            "judge: 2 of 48 differ |",
        ],
    ]


def test_counts_are_of_the_entries() -> None:
    counts = coverage(*ENTRIES).counts()
    assert list(counts) == list(STATUSES)
    assert {status: count for status, count in counts.items() if count} == {
        "pass": 3,
        "fail": 1,
        "refused": 2,
    }
    reached = coverage(*ENTRIES).reached("default")
    assert list(reached) == ["checkpoint", *PHASES, "exit code 0", "the judge agrees"]
    assert (reached.pop("checkpoint"), reached.pop("gather")) == (5, 5)
    assert set(reached.values()) == {2}
    assert set(coverage(*ENTRIES).reached("varied").values()) == {1}


def test_a_type_succeeds_on_both_checkpoints_or_not_at_all() -> None:
    pairs = [
        entry(name, variant=variant)
        for name in ("alpha", "mu", "nu")
        for variant in ("default", "varied")
    ]
    made = coverage(
        *pairs, entry("zeta"), entry("beta"), entry("beta", "wrong", "judge: x", variant="varied")
    )
    assert made.succeeded() == ["alpha", "mu", "nu"]
    assert made.summary().endswith("on both checkpoints: 3 of 5 causal types")
    assert coverage(*ENTRIES).succeeded() == ["alpha"]
    assert f">{made.summary().capitalize()}.<".strip("<>") in document(made)


def test_types_that_are_not_causal_are_apart() -> None:
    both = [
        entry("xi", "not-causal", "it looks ahead", variant=variant)
        for variant in ("default", "varied")
    ]
    made = coverage(entry("alpha"), entry("alpha", variant="varied"), *both)
    assert made.summary().endswith("1 of 1 causal types")
    assert "| xi |" not in document(made)
    assert "it looks ahead" in document(made)
    lost = coverage(
        entry("alpha"), entry("alpha", "not-causal", "it looks ahead", variant="varied")
    )
    assert lost.summary().endswith("0 of 1 causal types")  # what variation did is no excuse


def test_notes_on_style_are_counted_by_type() -> None:
    assert coverage(*ENTRIES).notes() == {"zeta": 2}
    assert "notes on style: 2, in 1 types" in document(coverage(*ENTRIES))


def test_reasons_that_differ_in_names_and_numbers_only_are_one_group() -> None:
    groups = group_by_reason([item for item in ENTRIES if item.status == "refused"])
    assert [[item.type for item in entries] for _, entries in groups] == [["beta", "gamma"]]


@pytest.mark.parametrize(
    ("reason", "common"),
    [
        ("model.layers.3.mlp differs: rmse ratio 1.2e-03", "… differs: rmse ratio N"),
        ("KeyError: 'sinks'", "KeyError: 'sinks'"),
        (
            "cannot translate BetaForCausalLM: Continue at modeling_beta.py:9. Report it",
            "cannot translate …: Continue",
        ),
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


def test_both_checkpoints_of_a_type_are_in_its_row() -> None:
    phases = {name: "done" for name in PHASES[:5]} | {"review": "failed"}
    text = document(
        coverage(
            entry("alpha"), entry("alpha", "fail", "review: P01", phases=phases, variant="varied")
        )
    )
    row = next(line for line in text.splitlines() if line.startswith("| alpha "))
    assert "| pass | 3e-07 | 5e-07 | 0 | 1.0 |" in row
    assert "| fail, test |" in row
    width = {
        line.count("|") for line in text[text.index("| type |") :].split("\n\n")[0].splitlines()
    }
    assert width == {14}


def test_hostile_reasons_stay_text() -> None:
    text = document(coverage(*ENTRIES))
    assert "<script>" not in text
    rows = [line for line in text.splitlines() if "delta" in line]
    assert len(rows) == 2
    assert rows[1].replace("\\|", "").count("|") == 5
    ElementTree.fromstring(picture(coverage(*ENTRIES)))


def test_the_picture_has_a_square_of_its_colour_for_each_type() -> None:
    tree = ElementTree.fromstring(picture(coverage(*ENTRIES)))
    squares = [
        rect.get("fill")
        for group in tree.iter()
        if group.tag.endswith("}g")
        for rect in group
        if rect.get("rx")
    ]
    statuses: list[Status] = ["pass", "refused", "fail", "refused", "pass"]
    assert squares == [COLORS[status] for status in statuses]
    places = {(rect.get("x"), rect.get("y")) for rect in tree.iter() if rect.get("rx")}
    assert len(places) == len(statuses)


def test_every_name_of_the_picture_can_be_read_whole() -> None:
    """Names overlap neither each other nor the picture's border, and what is no pass says so in
    words.
    """
    types = [entry(f"{letter * 12}_unified_assistant{letter}") for letter in "abcdefghijk"]
    types.append(entry("x_" * 12, "refused", "cannot"))
    made = coverage(*types)
    tree = ElementTree.fromstring(picture(made))
    groups = [group for group in tree.iter() if group.tag.endswith("}g")]
    texts = [text for group in groups for text in group if text.tag.endswith("}text")]
    labels = {text.text or "" for text in texts}
    assert labels == {
        each.type if each.status == "pass" else f"{each.type}: {each.status}"
        for each in made.entries
    }
    places = sorted(
        (float(text.get("y", 0)), float(text.get("x", 0)), len(text.text or "")) for text in texts
    )
    width = float(tree.get("width", 0))
    for (row, x, letters), (next_row, next_x, _) in zip(
        places, [*places[1:], (0.0, 0.0, 0)], strict=True
    ):
        assert x + 6 * letters <= (next_x if next_row == row else width)


def test_writing_and_reading_again(tmp_path: Path) -> None:
    made = coverage(*ENTRIES)
    paths = write_coverage(made, tmp_path)
    assert [path.as_posix() for path in paths] == [
        "registry/coverage.json",
        "docs/coverage.md",
        "docs/coverage.svg",
    ]
    read = Coverage.model_validate_json((tmp_path / "registry/coverage.json").read_text())
    assert read == made
    assert (tmp_path / "docs/coverage.md").read_text() == document(read)


def test_an_empty_sweep_has_a_document_too() -> None:
    empty = coverage(asked=3)
    assert empty.is_partial
    assert "Partial: 0 of 3" in document(empty)
    ElementTree.fromstring(picture(empty))

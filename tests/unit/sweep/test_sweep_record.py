"""What a target's record is judged to be: above all, never a pass that nothing shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.target_record import (
    LEVELS,
    STATUSES,
    TESTED,
    Entry,
    PhaseRecord,
    TargetRecord,
    conclude,
)
from onboard.workflow.sweep.verdict import NEW_TOKENS, Verdict


def phases(*names: str) -> list[PhaseRecord]:
    return [PhaseRecord(name=name, status="done", seconds=0.1) for name in names]


def row(level: str, **changes: Any) -> dict[str, Any]:
    measured = {"status": "passed", "error": 2e-7, "tolerance": 1e-5, "seconds": 0.1, "message": ""}
    return {
        "name": f"test_{level}",
        "level": level,
        "block": "",
        "device": "cpu",
        **measured,
        **changes,
    }


def agreement(**changes: Any) -> Verdict:
    measured: dict[str, Any] = {
        "prefill_error": 4e-7,
        "decode_error": 6e-7,
        "tokens": 2 * NEW_TOKENS,
    }
    return Verdict(
        **{"seed": 5, "lengths": [1, 70], "differing": 0, "largest_gap": 0.0, **measured, **changes}
    )


def good() -> TargetRecord:
    return TargetRecord(
        target=Target(name="llama"),
        step="test",
        seconds=8.04,
        architecture="LlamaForCausalLM",
        is_causal=True,
        missing=[],
        flow=0.1,
        phases=phases("gather", "survey", "analyze", "generate", "test"),
        lines=189,
        tests=[row(level) for level in TESTED],
        exit_code=0,
        verdict=agreement(),
    )


def failed(record: TargetRecord, name: str, error: str, **changes: Any) -> None:
    """End the record in a phase."""
    names = [phase.name for phase in record.phases]
    bad = PhaseRecord(name=name, status="failed", seconds=0.1, error=error, **changes)
    record.phases = [*record.phases[: names.index(name)], bad]
    if name != "test":
        record.tests, record.lines = [], None


def test_everything_measured_is_a_pass() -> None:
    entry = conclude(good(), "test")
    assert (entry.status, entry.level, entry.reason) == ("pass", "cached_decode", "")
    assert list(entry.levels) == list(LEVELS)
    assert set(entry.levels.values()) == {"passed"}
    assert entry.errors == dict.fromkeys(TESTED, 2e-7)
    assert (entry.lines, entry.seconds) == (189, 8.0)


def untested(**changes: Any) -> TargetRecord:
    """A record of a run that ended before the tests, judged on two ranks."""
    record = good()
    record.tests, record.phases = [], phases("gather", "survey", "analyze", "generate")
    record.verdict = agreement(world_size=2, divided={"mha": 4}, weights=9, **changes)
    return record


def test_without_tests_the_judge_alone_shows_what_is_equal() -> None:
    entry = conclude(untested(), "generate")
    assert (entry.status, entry.level, entry.reason) == ("pass", "prove", "")
    assert conclude(untested(), "test").status == "fail"  # they were asked for
    assert conclude(untested(decode_error=2e-5), "generate").status == "wrong"
    unproven = untested()
    unproven.phases[-1] = PhaseRecord(name="generate", status="failed", seconds=1.0, proving=True)
    assert conclude(unproven, "generate").status == "fail"


def test_what_ranks_cannot_divide_is_refused() -> None:
    entry = conclude(untested(refused="3 heads cannot be divided among 2 ranks"), "generate")
    assert (entry.status, entry.reason) == (
        "refused",
        "judge: 3 heads cannot be divided among 2 ranks",
    )


def test_a_judge_at_its_time_limit_is_not_wrong() -> None:
    record = untested()
    record.end, record.step, record.verdict, record.seconds = "timeout", "the judge", None, 60.0
    entry = conclude(record, "generate")
    assert entry.status == "timeout"
    assert entry.reason == "the time limit ended the judge after 60 s"


def without(level: str) -> Callable[[TargetRecord], None]:
    return lambda record: setattr(
        record, "tests", [test for test in record.tests if test["level"] != level]
    )


def with_row(level: str, **changes: Any) -> Callable[[TargetRecord], None]:
    """One more test of a level, among those that are fine."""
    return lambda record: record.tests.append(row(level, **changes))


def with_verdict(**changes: Any) -> Callable[[TargetRecord], None]:
    return lambda record: setattr(record, "verdict", agreement(**changes))


DISAGREEMENTS: dict[str, dict[str, Any]] = {
    "other logits": {"prefill_error": 2e-5},
    "logits that are no numbers": {"prefill_error": None},
    "NaN": {"prefill_error": math.nan},
    "other logits when it decodes": {"decode_error": 2e-5},
    "decoded logits that are no numbers": {"decode_error": None},
    "one other token": {"differing": 1},
    "a token that is no tie": {"largest_gap": 1e-3},
    "tokens that are no numbers": {"largest_gap": None},
    "too few tokens": {"tokens": NEW_TOKENS - 1},
    "no prompts": {"lengths": [], "tokens": 0},
    "it could not compare": {"error": "LLM does not start"},
    "it ended without a word": {"seed": None, "error": "the judge ended without a word: SIGKILL"},
}


BREAKS: dict[str, Callable[[TargetRecord], None]] = {
    **{f"no {level} test": without(level) for level in TESTED},
    **{
        f"a skipped {level} test": with_row(level, status="skipped", error=None) for level in TESTED
    },
    **{f"a failed {level} test": with_row(level, status="failed", error=0.3) for level in TESTED},
    "a test that compared nothing": with_row("model", error=None),
    "a NaN": with_row("model", error=math.nan),
    "an error that is no rounding": with_row(
        "model", error=2e-5, rounding={"ours": 3e-5, "theirs": 2e-5}
    ),
    "an error that only the test allows": with_row("model", error=2e-5, tolerance=0.05),
    "a negative error": with_row("model", error=-1.0),
    "no test at all": lambda record: setattr(record, "tests", []),
    "no phase": lambda record: setattr(record, "phases", []),
    "no analysis": lambda record: setattr(record, "phases", phases("gather", "generate", "test")),
    "no generation": lambda record: setattr(record, "phases", phases("gather", "analyze", "test")),
    "it stopped before the end": lambda record: setattr(record, "phases", record.phases[:-1]),
    "a phase was only planned": lambda record: setattr(record.phases[-1], "status", "planned"),
    "a phase took an old result": lambda record: setattr(record.phases[-1], "status", "skipped"),
    "the test phase failed": lambda record: failed(record, "test", "pytest died"),
    "the time was over": lambda record: setattr(record, "end", "timeout"),
    "a signal killed it": lambda record: setattr(record, "end", "killed"),
    "it died": lambda record: setattr(record, "end", "lost"),
    "nobody knows whether it is causal": lambda record: setattr(record, "is_causal", None),
    "it is not causal": lambda record: setattr(record, "is_causal", False),
    "a kind of layer is not in the checkpoint": lambda record: setattr(
        record, "missing", ["LlamaMoE"]
    ),
    "no token moves later logits": lambda record: setattr(record, "flow", 3e-7),
    "its logits are no numbers": lambda record: setattr(record, "flow", float("nan")),
    "nobody moved a token": lambda record: setattr(record, "flow", None),
    "nobody compared the kinds of layers": lambda record: setattr(record, "missing", None),
    "another exit code": lambda record: setattr(record, "exit_code", 1),
    "no exit code": lambda record: setattr(record, "exit_code", None),
    **{f"the judge: {name}": with_verdict(**changes) for name, changes in DISAGREEMENTS.items()},
    "no judge": lambda record: setattr(record, "verdict", None),
    "no checkpoint": lambda record: setattr(record, "error", "cannot be built"),
    "no architecture": lambda record: setattr(record, "architecture", ""),
}


def test_an_error_that_is_transformers_own_rounding_passes() -> None:
    record = good()
    with_row("model", error=2e-5, rounding={"ours": 2.3e-5, "theirs": 2e-5})(record)
    assert conclude(record, "test").status == "pass"


@pytest.mark.parametrize("name", BREAKS)
def test_one_thing_amiss_is_no_pass_and_says_why(name: str) -> None:
    record = good()
    BREAKS[name](record)
    entry = conclude(record, "test")
    assert entry.status != "pass"
    assert entry.status in STATUSES
    assert entry.reason


def test_what_is_not_causal_is_no_failure_of_ours() -> None:
    record = good()
    record.is_causal, record.phases, record.tests, record.lines = False, [], [], None
    record.why_not_causal = "it looks ahead"
    entry = conclude(record, "test")
    assert (entry.status, entry.level, entry.reason) == (
        "not-causal",
        "checkpoint",
        "it looks ahead",
    )


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_command_that_succeeds_with_what_the_judge_does_not_agree_with_is_wrong(
    name: str,
) -> None:
    record = good()
    record.verdict = agreement(**DISAGREEMENTS[name])
    entry = conclude(record, "test")
    assert (entry.status, entry.exit_code) == ("wrong", 0)
    assert entry.reason.startswith("judge: ")


def test_phases_and_notes_are_told() -> None:
    record = good()
    record.notes = 3
    record.phases = [
        *record.phases,
        PhaseRecord(name="review", status="failed", seconds=0.1, error="P01"),
    ]
    entry = conclude(record, "run")
    assert entry.phases == dict.fromkeys(
        ("gather", "survey", "analyze", "generate", "test"), "done"
    ) | {"review": "failed"}
    assert (entry.reached, entry.notes, entry.status, entry.reason) == (
        "test",
        3,
        "fail",
        "review: P01",
    )


def test_phases_beyond_the_tests_count_when_they_are_asked_for() -> None:
    record = good()
    assert conclude(record, "run").status == "fail"
    record.phases = [*record.phases, *phases("review", "register", "run")]
    assert conclude(record, "run").status == "pass"


@pytest.mark.parametrize(
    ("phase", "changes", "status", "level"),
    [
        ("analyze", {}, "refused", "checkpoint"),
        ("analyze", {"internal": True}, "fail", "checkpoint"),
        ("generate", {}, "refused", "analyze"),
        ("generate", {"proving": True}, "fail", "generate"),
        ("generate", {"internal": True}, "fail", "analyze"),
        ("generate", {"internal": True, "proving": True}, "fail", "generate"),
    ],
)
def test_where_it_stopped(phase: str, changes: dict[str, bool], status: str, level: str) -> None:
    record = good()
    failed(record, phase, "model.norm (LlamaRMSNorm) differs", **changes)
    entry = conclude(record, "test")
    assert (entry.status, entry.level) == (status, level)
    assert entry.reason == f"{phase}: model.norm (LlamaRMSNorm) differs"


def test_the_first_block_that_failed_is_named_bottom_up() -> None:
    record = good()
    record.tests[:0] = [
        row("model", status="failed", error=0.2),
        row("layer", block="model.layers.1", status="failed", error=0.4),
        row("block", block="model.layers.1.mlp", status="failed", error=0.5),
        row("block", block="model.norm", status="passed", error=3e-7),
    ]
    failed(record, "test", "test_block failed")
    entry = conclude(record, "test")
    assert (entry.status, entry.level, entry.block) == ("fail", "prove", "model.layers.1.mlp")
    assert entry.errors["block"] == 0.5
    assert {entry.levels[level] for level in ("block", "layer", "model")} == {"failed"}
    assert {entry.levels[level] for level in ("export", "cached_decode")} == {"passed"}


def test_a_skipped_level_is_shown_as_such() -> None:
    record = good()
    without("export")(record)
    entry = conclude(record, "test")
    assert entry.levels["export"] == "skipped"
    assert (entry.status, entry.level, entry.reason) == (
        "fail",
        "model",
        "the level export was skipped",
    )


def test_a_gpu_has_limits_of_its_own() -> None:
    record = good()
    record.tests += [row(level, device="cuda", error=4e-3, tolerance=0.05) for level in TESTED]
    assert conclude(record, "test").status == "pass"
    record.tests.append(row("model", device="cuda", error=0.06, tolerance=0.05))
    assert conclude(record, "test").status == "fail"


def test_entries_survive_json() -> None:
    entry = conclude(good(), "test")
    assert Entry.model_validate_json(entry.model_dump_json()) == entry


UNCACHED = (
    "onboard.errors.NoCachedFormError: 2 calls of torch_ssm have no cached form, "
    "so the model cannot generate yet"
)


def prefill_only(message: str = UNCACHED) -> TargetRecord:
    record = good()
    record.tests[-1] |= {"status": "failed", "error": None, "message": message}
    failed(record, "test", "test_cached_decode[cpu] failed")
    return record


def test_a_state_without_a_cached_form_is_a_status_of_its_own() -> None:
    entry = conclude(prefill_only(), "test")
    assert (entry.status, entry.level) == ("prefill", "export")
    assert entry.reason == UNCACHED.partition(": ")[2]


@pytest.mark.parametrize(
    "message",
    [
        "AssertionError: decode after 3 tokens: rmse ratio 4e-02",
        "onboard.errors.OnboardError: it has no cached form",
    ],
)
def test_a_cache_that_is_wrong_or_missing_for_another_reason_is_a_failure(message: str) -> None:
    assert conclude(prefill_only(message), "test").status == "fail"


BEYOND_PREFILL = ("cached_decode", "test phase", "exit code", "judge")


@pytest.mark.parametrize(
    "name", [name for name in BREAKS if not any(part in name for part in BEYOND_PREFILL)]
)
def test_prefill_is_as_strict_as_a_pass(name: str) -> None:
    record = prefill_only()
    BREAKS[name](record)
    assert conclude(record, "test").status != "prefill"

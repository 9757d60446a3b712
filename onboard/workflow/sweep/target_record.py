"""What a target's process left behind, and what follows from it.

A wrong "pass" is the one mistake that must not happen, so a pass is never assumed: each level has
to have tests, all of them passed, and each with a measured error within the limit.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from onboard.config import Mode, StrictModel
from onboard.errors import NoCachedFormError
from onboard.verify.rounding.against_float64 import Rounding
from onboard.verify.tolerances import SAME
from onboard.workflow.phases import PHASES
from onboard.workflow.sweep.inputs.targets import Target, Variant, label
from onboard.workflow.sweep.verdict import Verdict

Status = Literal["pass", "wrong", "prefill", "fail", "refused", "not-causal", "timeout", "crash"]
STATUSES: tuple[Status, ...] = (
    "pass",
    "wrong",
    "prefill",
    "fail",
    "refused",
    "not-causal",
    "timeout",
    "crash",
)
TESTED = ("block", "layer", "model", "export", "cached_decode")
"""Levels that the generated tests have, bottom-up."""
PREFILL = "export"
"""The last level that needs no cache."""
LEVELS = ("checkpoint", "analyze", "generate", "prove", *TESTED)
RUN = ("logits", "tokens")
"""Levels of a model that runs without a model file."""
LEAST_FLOW = 10 * SAME
"""How far a token has to move the logits of later ones, or none of these errors says anything of
attention.
"""
LevelStatus = Literal["passed", "failed", "skipped"]


def measured_levels(mode: Mode) -> tuple[str, ...]:
    """Return the levels of a mode that have an error."""
    return TESTED if mode == "graph" else RUN


def all_levels(mode: Mode) -> tuple[str, ...]:
    """Return the levels of a mode, in the order in which they are reached."""
    return LEVELS if mode == "graph" else ("checkpoint", "build", *RUN)


def asked_levels(mode: Mode, until: str) -> tuple[str, ...]:
    """Return the levels that a pass has to have: those of the tests only where these are run."""
    levels = all_levels(mode)
    if mode != "graph" or PHASES.index(until) >= PHASES.index("test"):
        return levels
    return tuple(level for level in levels if level not in TESTED)


class PhaseRecord(StrictModel):
    """A phase of the workflow that ended, in a target's process."""

    name: str
    status: str
    seconds: float
    error: str = ""
    proving: bool = False
    """The error came from the proof of a file that was generated."""
    internal: bool = False
    """The error was not meant for users."""


class TargetRecord(StrictModel):
    """What is known of one target's process when it has ended."""

    target: Target
    mode: Mode = "graph"
    end: Literal["exited", "timeout", "killed", "lost"] = "exited"
    """killed: by a signal; lost: it ended without saying how the last step went."""
    detail: str = ""
    """Of the end: the signal, or the last line that was printed."""
    step: str = "checkpoint"
    """What was done last: the checkpoint, a phase or the judge's part."""
    seconds: float = 0.0
    architecture: str = ""
    is_causal: bool | None = None
    why_not_causal: str = ""
    """What its logits depend on that they must not."""
    missing: list[str] | None = None
    """Classes of modules that the full model has and the tiny one lacks."""
    flow: float | None = None
    """How far a token moves the logits of later ones, in terms of their size."""
    options: list[str] = Field(default_factory=list)
    refused_options: dict[str, str] = Field(default_factory=dict)
    error: str = ""
    """Why there is no checkpoint."""
    phases: list[PhaseRecord] = Field(default_factory=list)
    lines: int | None = None
    """Length of the generated file."""
    tests: list[dict[str, Any]] = Field(default_factory=list)
    """As the test phase's `tests.json` has them."""
    notes: int | None = None
    """Of the review, on style; None: it said nothing of any."""
    exit_code: int | None = None
    """Of the command; None: it came to no end."""
    verdict: Verdict | None = None
    """The judge's; None: there was no proven file to judge."""
    cpu_seconds: float = 0.0
    """Of all its processes but a judge that goes on with other targets."""
    judge_seconds: float = 0.0


class Entry(StrictModel):
    """One line of the coverage: what a target came to."""

    type: str
    variant: Variant
    architecture: str
    status: Status
    level: str
    """The last level up to which everything passed; empty: not even a checkpoint."""
    levels: dict[str, LevelStatus]
    errors: dict[str, float]
    """Largest error of each level that measured one."""
    phases: dict[str, str] = Field(default_factory=dict)
    """What became of each phase that was reached, in order."""
    exit_code: int | None = None
    """Of the command; None: it came to no end, or was never called."""
    verdict: Verdict | None = None
    """The judge's; None: there was no proven file to judge."""
    notes: int | None = None
    """Of the review, on style; None: it was not reached, or counts none."""
    lines: int | None
    seconds: float
    cpu_seconds: float = 0.0
    reason: str
    """Why it is no pass; empty for a pass."""
    block: str = ""
    """The first block whose test failed."""
    options: list[str] = Field(default_factory=list)
    refused_options: dict[str, str] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """What the target is called in tables."""
        return label(self.type, self.variant)

    @property
    def reached(self) -> str:
        """The last phase that is done; empty: none."""
        return next(
            (name for name, status in reversed(self.phases.items()) if status == "done"), ""
        )

    @property
    def test_error(self) -> float | None:
        """The largest error of any test."""
        return max(self.errors.values(), default=None)

    @property
    def judge_error(self) -> float | None:
        """The largest error that the judge measured."""
        measured = (
            (self.verdict.prefill_error, self.verdict.decode_error) if self.verdict else (None,)
        )
        return None if None in measured else max(error for error in measured if error is not None)


def conclude(record: TargetRecord, until: str) -> Entry:
    """Return what a target came to, when the phases up to `until` were asked for."""
    levels = level_statuses(record)
    status, reason = _status(record, levels, until)
    failed = _failed_tests(record)
    return Entry(
        type=record.target.name,
        variant=record.target.variant,
        architecture=record.architecture,
        status=status,
        level=_reached(levels, record.mode),
        levels=levels,
        errors=_errors(record),
        phases={phase.name: phase.status for phase in record.phases},
        exit_code=record.exit_code,
        verdict=record.verdict,
        notes=record.notes,
        lines=record.lines,
        seconds=round(record.seconds, 1),
        cpu_seconds=round(record.cpu_seconds, 1),
        reason=" ".join(reason.split()),
        block=str(failed[0]["block"]) if failed and status == "fail" else "",
        options=record.options,
        refused_options=record.refused_options,
    )


def level_statuses(record: TargetRecord) -> dict[str, LevelStatus]:
    """Return how far each level came that was tried."""
    phases = {phase.name: phase for phase in record.phases}
    levels: dict[str, LevelStatus] = {}
    if record.architecture or record.error:
        levels["checkpoint"] = "failed" if record.error else "passed"
    if phase := phases.get("analyze"):
        levels["analyze"] = _passed(phase.status == "done")
    if phase := phases.get("generate"):
        levels["generate"] = _passed(phase.status == "done" or phase.proving)
        if levels["generate"] == "passed":
            levels["prove"] = _passed(phase.status == "done")
    if phase := phases.get("build"):
        levels["build"] = _passed(phase.status == "done")
    if record.tests:
        levels |= {level: _tested(record, level) for level in measured_levels(record.mode)}
    return levels


def _passed(good: bool) -> LevelStatus:
    return "passed" if good else "failed"


def _tested(record: TargetRecord, level: str) -> LevelStatus:
    """A level without tests, or with one that did not run, was skipped."""
    rows = [row for row in record.tests if row["level"] == level]
    if any(row["status"] == "failed" for row in rows):
        return "failed"
    if not rows or any(row["status"] != "passed" for row in rows):
        return "skipped"
    return _passed(all(_is_measured(row) for row in rows))


def _is_measured(row: dict[str, Any]) -> bool:
    """Whether a test compared numbers, and they were near enough by the limit of this module
    too, or by the rule of rounding.
    """
    error, limit = row["error"], SAME if row["device"] == "cpu" else row["tolerance"]
    if error is None or limit is None:
        return False
    own = row.get("rounding")
    return 0 <= error <= limit or (own is not None and Rounding(**own).is_theirs)


def _reached(levels: dict[str, LevelStatus], mode: Mode) -> str:
    reached = ""
    for level in all_levels(mode):
        if levels.get(level) != "passed":
            break
        reached = level
    return reached


def _errors(record: TargetRecord) -> dict[str, float]:
    measured = [row for row in record.tests if row["error"] is not None]
    return {
        level: max(row["error"] for row in measured if row["level"] == level)
        for level in measured_levels(record.mode)
        if any(row["level"] == level for row in measured)
    }


def _failed_tests(record: TargetRecord) -> list[dict[str, Any]]:
    failed = [row for row in record.tests if row["status"] == "failed"]
    order = {level: index for index, level in enumerate(measured_levels(record.mode))}
    return sorted(failed, key=lambda row: order.get(row["level"], len(order)))


def _status(record: TargetRecord, levels: dict[str, LevelStatus], until: str) -> tuple[Status, str]:
    """The status and, unless it is a pass, the reason."""
    if record.end == "timeout":
        return "timeout", f"the time limit ended {record.step} after {record.seconds:.0f} s"
    if record.end in ("killed", "lost"):
        return "crash", f"the process died in {record.step}: {record.detail or 'no last words'}"
    if record.error:
        return "fail", f"no tiny checkpoint: {record.error}"
    if record.is_causal is False:
        return "not-causal", record.why_not_causal or "nobody said what its logits depend on"
    if bad := next((phase for phase in record.phases if phase.status != "done"), None):
        if (bad.name, bad.status) == ("test", "failed") and _only_lacks_a_cache(record, levels):
            return "prefill", next(row["message"] for row in _failed_tests(record)).partition(": ")[
                2
            ]
        refused = not (bad.internal or bad.proving) and bad.name in (
            "gather",
            "survey",
            "analyze",
            "generate",
            "build",
        )
        return ("refused" if refused else "fail"), f"{bad.name}: {bad.error or bad.status}"
    if missing := next(
        (each for each in asked_levels(record.mode, until) if levels.get(each) != "passed"), None
    ):
        return "fail", f"the level {missing} was {_fate(levels.get(missing))}"
    if not _tells(record):
        return "fail", _untold(record)
    if (
        record.is_causal is not True
        or not record.phases
        or record.phases[-1].name != _last_phase(record, until)
    ):
        return "fail", f"the run did not come to the end of {until}"
    return _judged(record) if record.mode == "graph" else ("pass", "")


def _judged(record: TargetRecord) -> tuple[Status, str]:
    """The status of a target all of whose phases are done: the command has to say so, and the judge
    to agree.
    """
    if record.exit_code != 0:
        return "fail", f"the command's exit code is {record.exit_code}"
    if record.verdict is None:
        return "fail", "nobody judged what it left"
    if record.verdict.refused:
        return "refused", f"judge: {record.verdict.refused}"
    return ("pass", "") if record.verdict.agrees else ("wrong", f"judge: {record.verdict.reason}")


def _tells(record: TargetRecord) -> bool:
    """Whether equality on the tiny checkpoint says something of the full model; what nobody looked
    at does not.
    """
    return record.missing == [] and record.flow is not None and record.flow >= LEAST_FLOW


def _untold(record: TargetRecord) -> str:
    if record.missing != []:
        return (
            f"the tiny checkpoint lacks {', '.join(record.missing or ['what nobody looked for'])}"
        )
    if record.flow is None:
        return "nobody measured whether a token of the tiny checkpoint moves later logits"
    moved = f"by {record.flow:.0e} of their size"
    return f"a token moves the tiny checkpoint's later logits {moved}: equal ones say nothing"


def _only_lacks_a_cache(record: TargetRecord, levels: dict[str, LevelStatus]) -> bool:
    """Whether each test passed that needs no cache, and the others because the model's state has no
    cached form.

    A model of attention alone says so where that has a mask of its own; what was tried and differs never does.
    """
    said = f"{NoCachedFormError.__module__}.{NoCachedFormError.__qualname__}: "
    unable = all(
        row["level"] == "cached_decode" and row["message"].startswith(said)
        for row in _failed_tests(record)
    )
    complete = _tells(record) and record.is_causal is True
    return (
        unable
        and complete
        and _reached(levels, record.mode) == PREFILL
        and levels["cached_decode"] == "failed"
    )


def _last_phase(record: TargetRecord, until: str) -> str:
    return until if record.mode == "graph" else "build"


def _fate(status: LevelStatus | None) -> str:
    return {"failed": "not measured within the limit", "skipped": "skipped"}.get(
        status or "", "never tried"
    )

"""What a child may send of each task, as a schema: nothing is taken that is not in it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat

from onboard.codegen.measured import Measured
from onboard.workflow.remote.replies import Count, Line, Message, Reply, Text, Word


class Built(Message):
    """Elements by dtype of a model, and the names of each of its weights that has two."""

    counts: dict[Word, Count]
    tied: list[tuple[Word, Word]] = Field(max_length=10_000)


class Generated(Message):
    """A model file's text, and the largest error of its proof."""

    text: Text
    worst: FiniteFloat


class RecordedCall(Message):
    """The forms of what a class is given and gives."""

    arguments: dict[Word, Line]
    result: Line


class TestRounding(Message):
    """Errors of a test against float64 (`onboard.verify.rounding.against_float64.Rounding`)."""

    __test__ = False

    ours: FiniteFloat
    theirs: FiniteFloat


class TestRow(Message):
    """A row that the plugin `onboard.testing.plugin` leaves of a test."""

    __test__ = False

    name: Line
    level: Word
    block: Line
    device: Word
    status: Literal["passed", "failed", "skipped"]
    error: FiniteFloat | None
    tolerance: FiniteFloat | None
    rounding: TestRounding | None = None
    seconds: FiniteFloat
    message: Line


class Tested(Message):
    """What pytest printed, and the plugin's rows."""

    __test__ = False

    output: Text
    rows: list[TestRow] = Field(max_length=10_000)


class ReviewedItem(Message):
    """An item of a review (`onboard.review.reviewer.ReviewItem`)."""

    id: Word
    title: Line
    kind: Literal["contract", "style"]
    verdict: Literal["PASS", "FAIL", "NOTE"]
    evidence: list[Line] = Field(max_length=10_000)


class Reviewed(Message):
    """A review (`onboard.review.reviewer.Review.as_json`)."""

    verdict: Literal["PASS", "FAIL"]
    notes: Count
    items: list[ReviewedItem] = Field(max_length=1000)


REPLIES: dict[str, type[Reply[Any]]] = {
    "measure": Reply[Built],
    "analyze": Reply[Text],
    "generate": Reply[Generated],
    "check": Reply[FiniteFloat],
    "recorded": Reply[list[RecordedCall]],
    "port": Reply[Text],
    "logits": Reply[Count],
    "measure_model": Reply[Measured],
    "run_pytest": Reply[Tested],
    "review": Reply[Reviewed],
}
"""The schema of each task's reply."""

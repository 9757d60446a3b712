"""The rule-based reviewer: reads a generated model file and its tests against a checklist, knowing
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from onboard.analysis.spec import ModelSpec
from onboard.render import TEST_SUITE
from onboard.review.checklist import Item, Kind, Subject
from onboard.review.equivalence_checks import EQUIVALENCE_CHECKS
from onboard.review.generated_tests import GENERATED_TESTS
from onboard.review.model_contract import MODEL_CONTRACT
from onboard.review.model_ops import MODEL_OPS
from onboard.review.model_safety import MODEL_SAFETY
from onboard.review.model_tidiness import MODEL_TIDINESS
from onboard.review.python_source import Source

CHECKLIST: list[Item] = [
    *MODEL_CONTRACT,
    *MODEL_OPS,
    *MODEL_SAFETY,
    *MODEL_TIDINESS,
    *EQUIVALENCE_CHECKS,
    *GENERATED_TESTS,
]


Verdict = Literal["PASS", "FAIL", "NOTE"]


@dataclass(frozen=True)
class ReviewItem:
    """The verdict on one item of the checklist."""

    id: str
    title: str
    kind: Kind
    verdict: Verdict
    """What breaks the contract is a FAIL, what breaks style a NOTE."""
    evidence: list[str]
    """`file:line: text`: what breaks the rule, or what shows that it is kept."""


@dataclass(frozen=True)
class Review:
    """The verdicts on all items."""

    items: list[ReviewItem]

    @property
    def failed(self) -> list[ReviewItem]:
        """The items of the contract that are broken."""
        return [item for item in self.items if item.verdict == "FAIL"]

    @property
    def noted(self) -> list[ReviewItem]:
        """The items of style that are not kept everywhere."""
        return [item for item in self.items if item.verdict == "NOTE"]

    @property
    def notes(self) -> int:
        """How many places are noted."""
        return sum(len(item.evidence) for item in self.noted)

    def as_json(self) -> dict[str, Any]:
        """Return the content of `review.json`."""
        verdict = "FAIL" if self.failed else "PASS"
        return {
            "verdict": verdict,
            "notes": self.notes,
            "items": [asdict(item) for item in self.items],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Review:
        """Return the review that `as_json` gave the content of."""
        return cls([ReviewItem(**item) for item in content["items"]])


def review(
    model_file: Path,
    test_file: Path,
    spec: ModelSpec,
    root: Path | None = None,
    suite_file: Path = TEST_SUITE,
) -> Review:
    """Review a model file and its test file, and the suite that the latter inherits.

    Evidence shows paths relative to `root` (default: as given), and the suite's as that of this
    package.
    """
    base = root or Path()
    model = Source.load(model_file, base)
    # Its config class is written anew, with all that its checkpoints' configs say
    if spec.repository is not None:
        model = model.without_class(spec.config_class)
    suite = Source.load(suite_file, suite_file.parents[2])
    subject = Subject(model, Source.load(test_file, base), suite, spec, model_file)
    return Review([_judge(item, subject) for item in CHECKLIST])


def _judge(item: Item, subject: Subject) -> ReviewItem:
    outcome = item.check(subject)
    verdict: Verdict = "PASS" if outcome.passed else "FAIL" if item.kind == "contract" else "NOTE"
    return ReviewItem(
        item.id, item.title.format(spec=subject.spec), item.kind, verdict, outcome.evidence
    )

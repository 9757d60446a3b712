"""The rule-based reviewer: reads a generated model file and its tests against a checklist, knowing nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onboard.agents.equivalence_checks import EQUIVALENCE_CHECKS
from onboard.agents.model_contract import MODEL_CONTRACT
from onboard.agents.model_ops import MODEL_OPS
from onboard.agents.model_tidiness import MODEL_TIDINESS
from onboard.agents.source import Source
from onboard.agents.subject import Item, Subject
from onboard.analysis.spec import ModelSpec

CHECKLIST: list[Item] = [*MODEL_CONTRACT, *MODEL_OPS, *MODEL_TIDINESS, *EQUIVALENCE_CHECKS]


@dataclass(frozen=True)
class ReviewItem:
    """The verdict on one item of the checklist."""

    id: str
    title: str
    passed: bool
    evidence: list[str]
    """`file:line: text`: what breaks the rule, or what shows that it is kept."""


@dataclass(frozen=True)
class Review:
    """The verdicts on all items."""

    items: list[ReviewItem]

    @property
    def failed(self) -> list[ReviewItem]:
        """The items that did not pass."""
        return [item for item in self.items if not item.passed]

    def as_json(self) -> dict[str, Any]:
        """Return the content of `review.json`."""
        items = [{**asdict(item), "verdict": "PASS" if item.passed else "FAIL"} for item in self.items]
        return {"verdict": "FAIL" if self.failed else "PASS", "items": items}


def review(model_file: Path, test_file: Path, spec: ModelSpec, root: Path | None = None) -> Review:
    """Review a model file and its test file; evidence shows paths relative to `root` (default: as given)."""
    base = root or Path()
    model = Source.load(model_file, base)
    if spec.repository is not None:  # its config class is written anew, with all that its checkpoints' configs say
        model = model.without_class(spec.config_class)
    subject = Subject(model, Source.load(test_file, base), spec, model_file)
    return Review([_judge(item, subject) for item in CHECKLIST])


def _judge(item: Item, subject: Subject) -> ReviewItem:
    outcome = item.check(subject)
    return ReviewItem(item.id, item.title.format(spec=subject.spec), outcome.passed, outcome.evidence)

"""Phase review: the rule-based reviewer reads the model file and its tests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onboard.errors import OnboardError
from onboard.render import TEST_SUITE
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.test import model_path, test_path, tests_text
from onboard.workflow.remote import client as remote

if TYPE_CHECKING:
    from onboard.review.reviewer import Review


class ReviewPhase(Phase):
    """Each item of the checklist gets its verdict, with file and line; one FAIL fails the phase, a
    NOTE is shown.
    """

    name = "review"

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """The two files under review, the suite of the tests, the spec and the reviewer itself."""
        return {
            "model_file": context.files.digest(context.root / model_path(context)),
            "test_file": context.files.digest(context.root / test_path(context)),
            "suite": context.files.digest(TEST_SUITE),
            "spec": context.files.digest(context.artifact("spec.yaml")),
            "reviewer": {
                path.name: context.files.digest(path) for path in sorted(_REVIEWER.glob("*.py"))
            },
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Review, write `review.json`, and fail with the first item of the contract that is
        broken.
        """
        result = _review(context)
        path = context.write_json("review.json", result.as_json())
        if failed := result.failed:
            raise OnboardError(
                f"review: {len(failed)} of {len(result.items)} items failed, first {failed[0].id}"
                f" ({failed[0].title}): {failed[0].evidence[0]}",
                hint=f"See {path.relative_to(context.root)}",
            )
        return PhaseResult({"review": str(path.relative_to(context.root))}, _summary(result))


def _summary(result: Review) -> str:
    noted = (
        f"none failed; style notes: {result.notes} ({', '.join(item.id for item in result.noted)})"
    )
    return f"{len(result.items)} items reviewed, {noted if result.noted else 'all passed'}"


_REVIEWER = Path(__file__).resolve().parents[2] / "review"


def _review(context: RunContext) -> Review:
    """Review the files as they are, or as a dry run would have written them."""
    from onboard.review.reviewer import Review, review

    names = [model_path(context), test_path(context)]
    model, tests = context.files.read(context.root / names[0]), _tests(context)
    if context.spec.repository:
        arguments = {
            "spec": context.spec.to_yaml(),
            "model": model,
            "tests": tests,
            "names": list(map(str, names)),
        }
        return Review.from_json(remote.call(context, "review", **arguments).model_dump())
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for path, text in zip(names, (model, tests), strict=True):
            copy = Path(folder, path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")
            paths.append(copy)
        return review(paths[0], paths[1], context.spec, root=Path(folder))


def _tests(context: RunContext) -> str:
    """Return the tests of the run's model: where a relative's run has put its own meanwhile, those
    that it replaced.
    """
    path = context.root / test_path(context)
    # Before it is asked whose it is, as that may change at any moment
    text = context.files.read(path)
    return tests_text(context) if context.files.is_anothers(path) else text

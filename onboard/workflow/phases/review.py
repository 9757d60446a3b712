"""Phase review: the rule-based reviewer reads the model file and its tests."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onboard.errors import OnboardError
from onboard.render import TEST_SUITE
from onboard.workflow import team
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.test import model_path, problem_of, test_path, tests_text
from onboard.workflow.remote import client as remote

if TYPE_CHECKING:
    from onboard.review.reviewer import Review


class ReviewPhase(Phase):
    """Each item of the checklist gets its verdict, with file and line; one FAIL fails the phase, a
    NOTE is shown.
    """

    name = "review"

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """The two files under review, the suite of the tests, the spec and the reviewer itself, or
        who plays it beside the rules.
        """
        agent = context.options.agents.reviewer
        return {
            "model_file": context.files.digest(context.root / model_path(context)),
            "test_file": context.files.digest(context.root / test_path(context)),
            "suite": context.files.digest(TEST_SUITE),
            "spec": context.files.digest(context.artifact("spec.yaml")),
            "reviewer": {
                path.name: context.files.digest(path) for path in sorted(_REVIEWER.glob("*.py"))
            },
            **({} if agent.kind == "builtin" else {"agent": agent.model_dump(mode="json")}),
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Review, write `review.json`, and fail with the first item of the contract that is
        broken.
        """
        result, iterations = _until_passed(context)
        path = context.write_json("review.json", result.as_json() | {"iterations": iterations})
        if failed := result.failed:
            raise OnboardError(
                f"review: {len(failed)} of {len(result.items)} items failed, first {failed[0].id}"
                f" ({failed[0].title}): {failed[0].evidence[0]}",
                hint=f"See {path.relative_to(context.root)}",
            )
        found = _summary(result) + (f"; iterations: {iterations}" if iterations > 1 else "")
        return PhaseResult({"review": str(path.relative_to(context.root))}, found)


def _until_passed(context: RunContext) -> tuple[Review, int]:
    """Review, have mended what fails, and review again, as long as somebody mends it; return the last
    review and how many there were.
    """
    most = context.options.agents.repairer.attempts
    for iteration in count(1):
        text = context.files.read(context.root / model_path(context))
        result = _with_agent(_review(context, text), context, text)
        if not result.failed or iteration > most or not _mended(context, text, result):
            return result, iteration
    raise AssertionError


def _mended(context: RunContext, text: str, result: Review) -> bool:
    """Put the model file as the repairer has mended it, if there is one; whether there is."""
    tests = _tests(context)
    problem = "\n".join(
        f"{item.id} ({item.title}): {line}" for item in result.failed for line in item.evidence[:5]
    )

    def more(candidate: str) -> str:
        if failed := _review(context, candidate).failed:
            return f"{failed[0].id} ({failed[0].title}): {failed[0].evidence[0]}"
        return problem_of(context, candidate, tests=tests)

    mended = team.repaired(context, text, problem, more=more)
    path = context.root / model_path(context)
    return mended is not None and context.files.put(path, mended, replacing=True)


def _with_agent(result: Review, context: RunContext, text: str) -> Review:
    """Add what an agent finds, if one plays the reviewer: it can fail an item, and pass none that
    the rules fail.
    """
    from onboard.review.reviewer import Review, ReviewItem

    if not team.is_asked(context, "reviewer"):
        return result
    contract = {item.id: item for item in result.items if item.kind == "contract"}
    names = (str(model_path(context)), str(test_path(context)))
    files = dict(zip(names, (text, _tests(context)), strict=True))
    found = team.reviewed(context, files, {id: item.title for id, item in contract.items()})
    items = []
    for item in result.items:
        evidence = found.get(item.id)
        if evidence and item.verdict == "PASS":
            item = ReviewItem(item.id, item.title, item.kind, "FAIL", evidence)
        items.append(item)
    return Review(items)


def _summary(result: Review) -> str:
    noted = (
        f"none failed; style notes: {result.notes} ({', '.join(item.id for item in result.noted)})"
    )
    return f"{len(result.items)} items reviewed, {noted if result.noted else 'all passed'}"


_REVIEWER = Path(__file__).resolve().parents[2] / "review"


def _review(context: RunContext, model: str) -> Review:
    """Review a text of the model file, and the tests as they are or as a dry run would have written
    them.
    """
    from onboard.review.reviewer import Review, review

    names = [model_path(context), test_path(context)]
    tests = _tests(context)
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

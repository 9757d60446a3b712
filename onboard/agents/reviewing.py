"""A review by an agent: a verdict with evidence on every item, of files that it only reads."""

from __future__ import annotations

import re
from collections.abc import Collection

from onboard.agents.answers import ReviewAnswer, ReviewedItem, read_answer
from onboard.agents.assignment import Assignment
from onboard.agents.refused import RefusedError
from onboard.agents.workspace import Reply, Workspace

_EVIDENCE = re.compile(r"([\w./-]+):(\d+):")


def asked_review(assignment: Assignment, items: Collection[str]) -> list[ReviewedItem]:
    """Return an agent's verdicts on these items.

    Raises:
        OnboardError: no answer had a verdict on each, with evidence that is there.
    """
    workspace = assignment.workspace
    return assignment.answered(lambda reply: _read(reply, items, workspace), _verdict).items


def _verdict(answer: ReviewAnswer) -> str:
    failed = [item.id for item in answer.items if item.verdict == "FAIL"]
    return f"FAIL: {', '.join(failed)}" if failed else "PASS"


def _read(reply: Reply, items: Collection[str], workspace: Workspace) -> ReviewAnswer:
    if reply.files:
        raise RefusedError(f"a reviewer reads only, and {sorted(reply.files)[0]} was changed")
    answer = read_answer(reply.text, ReviewAnswer)
    given = [item.id for item in answer.items]
    if len(given) != len(set(given)) or set(given) != set(items):
        other = sorted(set(given) ^ set(items)) or ["an item is there twice"]
        raise RefusedError(f"each item has to have one verdict: {', '.join(other)[:300]}")
    for item in answer.items:
        for line in item.evidence:
            _check_evidence(line, item.id, workspace)
    return answer


def _check_evidence(line: str, item: str, workspace: Workspace) -> None:
    """Raise where evidence names no line of a file under review."""
    found = _EVIDENCE.match(line.strip())
    text = workspace.files.get(found[1]) if found is not None else None
    if found is None or text is None or not 1 <= int(found[2]) <= len(text.splitlines()):
        raise RefusedError(f"the evidence of {item} names no line of the files: {line[:200]}")

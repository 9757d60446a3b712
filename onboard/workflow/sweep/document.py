"""`docs/coverage.md` and its picture, made from `registry/coverage.json` alone."""

from __future__ import annotations

from pathlib import Path

from onboard.codegen.render import render
from onboard.workflow.engine import PHASES
from onboard.workflow.sweep.coverage import Coverage, group_by_reason, worst
from onboard.workflow.sweep.record import STATUSES, Entry, Status
from onboard.workflow.tables import cell

DOCUMENT = Path("docs", "coverage.md")
PICTURE = Path("docs", "coverage.svg")
COLORS: dict[Status, str] = {
    "pass": "#2e7d32",
    "wrong": "#ff1744",
    "prefill": "#9ccc65",
    "fail": "#c62828",
    "refused": "#ef8f00",
    "not-causal": "#78909c",
    "timeout": "#6a1b9a",
    "crash": "#212121",
}
_MEANINGS: dict[Status, str] = {
    "pass": "the command came to its end with exit code 0, every error is within the limit, and the judge agrees",
    "wrong": "the command's exit code is 0, and the judge does not agree",
    "prefill": "every level of prefill is as in a pass; what it keeps from token to token has no cached form yet",
    "fail": "something was generated, built or tested, and it is wrong or came to no end",
    "refused": "the tool said, before it wrote any model file, what it cannot do yet",
    "not-causal": "the model itself is no causal language model: its logits depend on later tokens or on chance",
    "timeout": "the time limit ended it",
    "crash": "its process died",
}
_COLUMNS, _CELL, _LEFT, _TOP = 21, 34, 12, 64


def document(coverage: Coverage, root: Path | None = None) -> str:
    """Return the Markdown text."""
    return render(
        "coverage/coverage.md.j2",
        root,
        coverage=coverage,
        counts=coverage.counts(),
        meanings=_MEANINGS,
        reached={variant: coverage.reached(variant) for variant in coverage.variants},
        last=PHASES[-1],
        groups={
            status: [(cell(reason), entries) for reason, entries in group_by_reason(_of(coverage, status))]
            for status in STATUSES
            if status != "pass"
        },
        picture=PICTURE.name,
        cell=cell,
    )


def picture(coverage: Coverage, root: Path | None = None) -> str:
    """Return the SVG: a square for each type, in the order of the file, coloured by the worse of its statuses."""
    entries = [worst(entries) for entries in coverage.types().values()]
    counts = {status: sum(entry.status == status for entry in entries) for status in STATUSES}
    squares = [
        {
            "x": _LEFT + index % _COLUMNS * _CELL,
            "y": _TOP + index // _COLUMNS * _CELL,
            "color": COLORS[entry.status],
            "name": entry.type,
            "entry": entry,
        }
        for index, entry in enumerate(entries)
    ]
    rows = -(-max(1, len(entries)) // _COLUMNS)
    return render(
        "coverage/coverage.svg.j2",
        root,
        coverage=coverage,
        squares=squares,
        legend=[(status, count, COLORS[status]) for status, count in counts.items() if count],
        size=_CELL - 3,
        width=2 * _LEFT + _COLUMNS * _CELL,
        height=_TOP + rows * _CELL + _LEFT,
    )


def _of(coverage: Coverage, status: Status) -> list[Entry]:
    return [entry for entry in coverage.entries if entry.status == status]

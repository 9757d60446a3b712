"""`docs/coverage.md` and its picture, made from `registry/coverage.json` alone."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from onboard.render import render
from onboard.workflow.files import write_atomically
from onboard.workflow.phases import PHASES
from onboard.workflow.reporting.markdown_tables import cell
from onboard.workflow.sweep.coverage import PATH, Coverage, group_by_reason, worst
from onboard.workflow.sweep.target_record import STATUSES, Entry, Status

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
_WIDTH, _LEFT, _TOP, _SIZE, _ROW = 720, 12, 64, 12, 19
"""Of the picture, in pixels."""
_LETTER = 6.4
"""The most that a letter of a name takes on average, in pixels."""


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
            status: [
                (cell(reason), entries)
                for reason, entries in group_by_reason(_of(coverage, status))
            ]
            for status in STATUSES
            if status != "pass"
        },
        picture=PICTURE.name,
        cell=cell,
    )


def judged_table(coverage: Coverage, root: Path | None = None) -> str:
    """Return a table of what the judge measured of each checkpoint, or why it did not."""
    return render(
        "coverage/judged.md.j2", root, coverage=coverage, counts=coverage.counts(), cell=cell
    )


def picture(coverage: Coverage, root: Path | None = None) -> str:
    """Return the SVG: a square for each type, in the order of the file, coloured by the worse of
    its statuses.

    The whole name is beside it, and the status in words where it is no pass.
    """
    entries = [worst(entries) for entries in coverage.types().values()]
    counts = {status: sum(entry.status == status for entry in entries) for status in STATUSES}
    labels = [
        entry.type if entry.status == "pass" else f"{entry.type}: {entry.status}"
        for entry in entries
    ]
    cell_width = round(_SIZE + 16 + _LETTER * max(map(len, labels), default=0))
    columns = max(1, (_WIDTH - 2 * _LEFT) // cell_width)
    squares = [
        {
            "x": _LEFT + index % columns * cell_width,
            "y": _TOP + index // columns * _ROW,
            "color": COLORS[entry.status],
            "name": entry.type,
            "label": label,
            "entry": entry,
        }
        for index, (entry, label) in enumerate(zip(entries, labels, strict=True))
    ]
    return render(
        "coverage/coverage.svg.j2",
        root,
        coverage=coverage,
        squares=squares,
        legend=_legend(counts),
        size=_SIZE,
        width=_WIDTH,
        height=_TOP + -(-max(1, len(entries)) // columns) * _ROW + _LEFT,
    )


def _legend(counts: dict[Status, int]) -> list[tuple[int, str, str]]:
    """Return place, text and colour of each status that there is."""
    texts = {status: f"{status} {count}" for status, count in counts.items() if count}
    widths = [round(_SIZE + 12 + _LETTER * len(text)) for text in texts.values()]
    starts = accumulate(widths, initial=_LEFT)
    return [
        (start, text, COLORS[status])
        for start, (status, text) in zip(starts, texts.items(), strict=False)
    ]


def _of(coverage: Coverage, status: Status) -> list[Entry]:
    return [entry for entry in coverage.entries if entry.status == status]


def write_coverage(coverage: Coverage, root: Path) -> list[Path]:
    """Write the file, the document and the picture; return their paths relative to the root."""
    texts = {
        PATH: coverage.text(),
        DOCUMENT: document(coverage, root),
        PICTURE: picture(coverage, root),
    }
    for path, text in texts.items():
        write_atomically(root / path, text)
    return list(texts)

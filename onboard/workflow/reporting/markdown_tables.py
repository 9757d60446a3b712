"""Tables of a Markdown file that people may edit: rows are added or replaced by key, the rest of
the text stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Merge = Callable[[list[str], list[str]], list[str]]


def upsert_row(text: str, heading: str, row: list[str], key_columns: int, merge: Merge) -> str:
    """Return `text` with `row` in the table under `heading`, rows sorted by their first
    `key_columns` cells.

    A row with the same key becomes `merge(old, new)`. Raises ValueError when there is no such
    table.
    """
    lines = text.splitlines()
    start, end = _table(lines, heading)
    rows = [split_row(line) for line in lines[start:end]]
    same = next((old for old in rows if old[:key_columns] == row[:key_columns]), None)
    rows = [old for old in rows if old is not same] + [merge(same, row) if same else row]
    rows.sort(key=lambda cells: [cell.lower() for cell in cells[:key_columns]])
    lines[start:end] = [join_row(cells) for cells in rows]
    return "\n".join(lines) + "\n"


def with_column(text: str, heading: str, column: str, after: str, value: str) -> str:
    """Return `text` with a column behind `after`, and `value` in its rows, in the table under
    `heading`.

    A table that has the column, or not the one before it, is left as it is. Raises ValueError when
    there is no table.
    """
    lines = text.splitlines()
    start, end = _table(lines, heading)
    header = split_row(lines[start - 2])
    if column in header or after not in header:
        return text
    at = header.index(after) + 1
    for index, added in enumerate([column, "---", *[value] * (end - start)], start - 2):
        cells = split_row(lines[index])
        lines[index] = join_row([*cells[:at], added, *cells[at:]])
    lines[start - 1] = lines[start - 1].replace(" ", "")
    return "\n".join(lines) + "\n"


def rows_under(text: str, heading: str) -> list[list[str]]:
    """Return the rows of the table under `heading`; none where there is no such table."""
    lines = text.splitlines()
    try:
        start, end = _table(lines, heading)
    except ValueError:
        return []
    return [split_row(line) for line in lines[start:end]]


def upsert_footnote(text: str, label: str, note: str) -> str:
    """Return `text` with the footnote `[^label]: note` among the others, sorted; a first one goes
    to the end.
    """
    lines = text.rstrip("\n").split("\n")
    notes = {match[1]: line for line in lines if (match := re.match(r"\[\^([^\]]+)\]: ", line))}
    at = next((index for index, line in enumerate(lines) if line in notes.values()), None)
    kept = [line for line in lines if line not in notes.values()]
    notes[label] = f"[^{label}]: {note}"
    block = [notes[name] for name in sorted(notes)]
    if at is None:
        return "\n".join([*kept, "", *block]) + "\n"
    return "\n".join([*kept[:at], *block, *kept[at:]]) + "\n"


def split_row(line: str) -> list[str]:
    """Return the cells of a table row, with escaped bars kept escaped."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def join_row(cells: list[str]) -> str:
    """Return a table row."""
    return f"| {' | '.join(cells)} |"


def cell(value: object) -> str:
    """Return a value as the text of one cell: one line, bars escaped, no markup."""
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _table(lines: list[str], heading: str) -> tuple[int, int]:
    """Return the range of a table's rows, below its header and rule."""
    at = next((index for index, line in enumerate(lines) if line.strip() == heading), None)
    rule = next(
        (
            i
            for i in range(at or 0, len(lines))
            if re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", lines[i].strip())
        ),
        None,
    )
    if at is None or rule is None:
        raise ValueError(f"there is no table under {heading!r}")
    end = rule + 1
    while end < len(lines) and lines[end].lstrip().startswith("|"):
        end += 1
    return rule + 1, end

"""Write syntax trees as text, with the blank lines of the source that they come from."""

from __future__ import annotations

import ast
from collections.abc import Sequence

_INDENT = "    "


def print_block(body: Sequence[ast.stmt], depth: int = 0) -> str:
    """Return statements as text, indented by `depth` levels."""
    lines: list[str] = []
    previous: ast.stmt | None = None
    for statement in body:
        if previous is not None and _gap(previous, statement):
            lines.append("")
        lines.append(_print(statement, depth))
        previous = statement
    return "\n".join(lines)


def _gap(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether the source has a blank line (or a comment) between two statements."""
    end = getattr(first, "end_lineno", None)
    start = getattr(second, "lineno", None)
    return end is not None and start is not None and start - end > 1


def _print(statement: ast.stmt, depth: int) -> str:
    pad = _INDENT * depth
    match statement:
        case ast.If(test=test, body=body, orelse=orelse):
            text = f"{pad}if {ast.unparse(test)}:\n{print_block(body, depth + 1)}"
            return f"{text}\n{pad}else:\n{print_block(orelse, depth + 1)}" if orelse else text
        case ast.For(target=target, iter=iterable, body=body):
            head = f"{pad}for {ast.unparse(target).strip('()')} in {ast.unparse(iterable)}:"
            return f"{head}\n{print_block(body, depth + 1)}"
    text = ast.unparse(ast.fix_missing_locations(statement))
    return "\n".join(pad + line for line in text.splitlines())

"""Names for the results of calls: those that the recorded code gives them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from onboard.codegen.straight.straight_lines import Line

_FIXED = {"self", "torch", "nn", "math", "zip", "enumerate", "slice", "float", "_"}


class Names:
    """Gives out names, each once."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken | _FIXED

    def fresh(self, stem: str) -> str:
        """Return the stem, with a number where it is taken."""
        found, index = stem, 0
        while found in self.taken:
            index += 1
            found = f"{stem}_{index}"
        self.taken.add(found)
        return found

    def of(self, line: Line, behind: tuple[Any, ...]) -> list[str]:
        """Return the variables that the code assigns a call's result to, where it is the last call
        of its statement.
        """
        here = _statement(*line.place)
        after = [_statement(*item.place) for item in behind if isinstance(item, Line)]
        return [] if here is None or here in after else _targets(here)


def _targets(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=found)]) | ast.AugAssign(target=ast.Name(id=found)):
            return [found]
        case ast.Assign(targets=[ast.Tuple(elts=items)]) if all(
            isinstance(item, ast.Name) for item in items
        ):
            return [item.id for item in items if isinstance(item, ast.Name)]
    return []


def _statement(file: str, line: int) -> ast.stmt | None:
    """Return the innermost simple statement at a line."""
    fitting = [
        node for node in _simple(file) if node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return fitting[-1] if fitting else None


@cache
def _simple(file: str) -> list[ast.stmt]:
    if not file:
        return []
    tree = ast.parse(Path(file).read_text(encoding="utf-8-sig"))
    kinds = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, ast.AnnAssign)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]

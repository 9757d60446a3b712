"""Write syntax trees as text, with the blank lines of the source that they come from, where these
part more than a line or two.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.analysis.source import ModuleSource
from onboard.codegen.tidy.lines import lines_of

_INDENT = "    "
_PARAGRAPH = 3
"""Lines that a blank one may follow."""


def print_block(
    body: Sequence[ast.stmt], source: ModuleSource | None = None, depth: int = 0
) -> str:
    """Return statements as text, indented by `depth` levels; `source` is where they come from."""
    paragraphs: list[list[str]] = [[]]
    for before, statement in zip([None, *body], body, strict=False):
        apart = source is not None and source.is_apart(getattr(statement, "lineno", 0))
        if apart and not _belong(before, statement) and len(paragraphs[-1]) >= _PARAGRAPH:
            paragraphs.append([])
        paragraphs[-1] += _print(statement, source, depth).splitlines()
    if len(paragraphs) > 1 and len(paragraphs[-1]) == 1 and _is_short(body[-1]):
        last = paragraphs.pop()
        paragraphs[-1] += last
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def _belong(before: ast.stmt | None, statement: ast.stmt) -> bool:
    """Whether two statements are no two paragraphs: of one line of the source, or both of them
    keep fields of the config.
    """
    lines = {getattr(item, "lineno", 0) for item in (before, statement)}
    return len(lines) == 1 or (_is_setting(before) and _is_setting(statement))


def _is_short(statement: ast.stmt) -> bool:
    """Whether a statement of one line is no paragraph of its own: anything but what is returned."""
    return not isinstance(statement, ast.Return) and lines_of([statement]) == 1


def _is_setting(statement: ast.stmt | None) -> bool:
    """Whether a statement keeps a field of the config: `self.size = config.size`."""
    match statement:
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name(id="self"))],
            value=ast.Attribute(value=ast.Name(id="config")),
        ):
            return True
    return False


def _print(statement: ast.stmt, source: ModuleSource | None, depth: int) -> str:
    pad = _INDENT * depth
    match statement:
        case ast.If(test=test, body=body, orelse=orelse):
            text = f"{pad}if {ast.unparse(test)}:\n{print_block(body, source, depth + 1)}"
            return "\n".join([text, *_print_else(orelse, source, depth)])
        case ast.For(target=target, iter=iterable, body=body):
            places = target.elts if isinstance(target, ast.Tuple) and target.elts[1:] else [target]
            names = ", ".join(map(ast.unparse, places))
            head = f"{pad}for {names} in {ast.unparse(iterable)}:"
            return f"{head}\n{print_block(body, source, depth + 1)}"
        case ast.While(test=test, body=body):
            return f"{pad}while {ast.unparse(test)}:\n{print_block(body, source, depth + 1)}"
        case ast.Return(value=ast.Tuple(elts=[_, _, *_] as items)):
            return f"{pad}return {', '.join(map(ast.unparse, items))}"
        case ast.Assign(targets=[ast.Tuple(elts=places)], value=ast.Tuple(elts=items)) if (
            len(places) == len(items) > 1
        ):
            return (
                f"{pad}{', '.join(map(ast.unparse, places))} = {', '.join(map(ast.unparse, items))}"
            )
    text = ast.unparse(ast.fix_missing_locations(deepcopy(statement)))
    return "\n".join(pad + line for line in text.splitlines())


def _print_else(orelse: Sequence[ast.stmt], source: ModuleSource | None, depth: int) -> list[str]:
    pad = _INDENT * depth
    match orelse:
        case []:
            return []
        case [ast.If() as other]:
            return [f"{pad}el{_print(other, source, depth).removeprefix(pad)}"]
    return [f"{pad}else:", print_block(orelse, source, depth + 1)]

"""A module's source, cut into the statements of its top level, each with the names that it binds
and reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

PACKAGE = "onboard"
_REGISTRATION = "register_op"
"""The decorator that gives a function to `torch.ops`, which calls of plain functions do without."""

Edit = tuple[int, int, str]
"""The characters from the first number to the second one are to be this text."""


@dataclass(frozen=True)
class Statement:
    """One statement of a module's top level."""

    node: ast.stmt
    end: int
    """Its last line: that of the docstring behind an assignment."""

    @cached_property
    def binds(self) -> frozenset[str]:
        """The names that the module has by it."""
        return frozenset(_bound(self.node))

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names that stand in it, those of functions' own variables among them, but no
        parameters.
        """
        found = {
            node.id
            for part in self._parts()
            for node in ast.walk(part)
            if isinstance(node, ast.Name)
        }
        if isinstance(self.node, ast.FunctionDef):
            inside = {
                node.id
                for part in self.node.body
                for node in ast.walk(part)
                if isinstance(node, ast.Name)
            }
            outside = {node.id for node in ast.walk(self.node.args) if isinstance(node, ast.Name)}
            parameters = {
                node.arg for node in ast.walk(self.node.args) if isinstance(node, ast.arg)
            }
            found -= (inside & parameters) - outside
        return frozenset(found)

    @cached_property
    def own_imports(self) -> list[ast.ImportFrom]:
        """The imports of this package's modules, those inside functions too."""
        return [
            node
            for node in ast.walk(self.node)
            if isinstance(node, ast.ImportFrom) and is_own(node.module)
        ]

    @property
    def is_import(self) -> bool:
        """Whether it is an import and nothing else."""
        return isinstance(self.node, ast.Import | ast.ImportFrom)

    @property
    def is_action(self) -> bool:
        """Whether it binds nothing and was written for what it does."""
        return isinstance(self.node, ast.Expr) and not isinstance(self.node.value, ast.Constant)

    @cached_property
    def registrations(self) -> list[ast.expr]:
        """Its decorators that an exported function does without."""
        return [
            each
            for each in getattr(self.node, "decorator_list", ())
            if _name(each) == _REGISTRATION
        ]

    def _parts(self) -> Iterator[ast.AST]:
        for part in ast.iter_child_nodes(self.node):
            if part not in self.registrations:
                yield part


class Module:
    """The source of a module; `name` is its full dotted name."""

    def __init__(self, name: str, text: str, *, is_package: bool = False) -> None:
        self.name = name
        self.text = text
        self.package = name if is_package else name.rpartition(".")[0]
        self.statements = list(_statements(ast.parse(text)))
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    @property
    def docstring(self) -> str:
        """The module's docstring as it is written; empty without one."""
        first = self.statements[0].node if self.statements else None
        is_string = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return self.text[slice(*self.span(first))] if first is not None and is_string else ""

    def binding(self, name: str) -> list[Statement]:
        """Return the statements that bind a name."""
        return [statement for statement in self.statements if name in statement.binds]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node's text begins and ends, in characters."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(
            node.end_lineno, node.end_col_offset
        )

    def cut(self, statement: Statement, edits: list[Edit]) -> str:
        """Return a statement's text with the comment above it, edited, without registrations."""
        node = statement.node
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        while first > 1 and self._lines[first - 2].startswith("#"):
            first -= 1
        start, end = self._starts[first - 1], self._starts[statement.end]
        dropped = [self.line_span(each) for each in statement.registrations]
        return edited(self.text, [(*span, "") for span in dropped] + edits, start, end).rstrip()

    def line_span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where the lines of a node begin and end, in characters."""
        assert node.end_lineno is not None
        return self._starts[node.lineno - 1], self._starts[node.end_lineno]

    def _at(self, line: int, column: int) -> int:
        """Return the place of a column, which `ast` counts in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def edited(text: str, edits: list[Edit], start: int = 0, end: int | None = None) -> str:
    """Return `text[start:end]` with those of the edits that lie in it made."""
    end = len(text) if end is None else end
    pieces, done = [], start
    for first, last, new in sorted(edits):
        if start <= first and last <= end:
            pieces += [text[done:first], new]
            done = last
    return "".join([*pieces, text[done:end]])


def is_own(module: str | None) -> bool:
    """Whether a module is one of this package."""
    return module is not None and (module == PACKAGE or module.startswith(f"{PACKAGE}."))


def _statements(tree: ast.Module) -> Iterator[Statement]:
    """Yield the statements; the docstring of an assignment belongs to it."""
    body = tree.body
    for index, node in enumerate(body):
        following = body[index + 1] if index + 1 < len(body) else None
        is_described = isinstance(node, ast.Assign | ast.AnnAssign) and _is_string(following)
        if index and _is_string(node) and isinstance(body[index - 1], ast.Assign | ast.AnnAssign):
            continue
        last = following if is_described and following is not None else node
        yield Statement(node, last.end_lineno or last.lineno)


def _is_string(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif isinstance(part, ast.alias):
            yield (part.asname or part.name).partition(".")[0]


def _name(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.id if isinstance(called, ast.Name) else ""

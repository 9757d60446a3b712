"""A Python file as a reviewer reads it: its text, its syntax tree, and places in it to point at."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

from onboard.errors import OnboardError

N = TypeVar("N", bound=ast.AST)
Function = ast.FunctionDef


@dataclass(frozen=True)
class Source:
    """One file under review."""

    path: str
    """As shown in evidence."""
    text: str
    tree: ast.Module

    @classmethod
    def load(cls, path: Path, root: Path) -> Source:
        """Read a file; evidence shows its path relative to `root`."""
        shown = (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()
        return cls.parse(shown, path.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, shown: str, text: str) -> Source:
        """Parse the text of a file; evidence calls it `shown`."""
        try:
            return cls(shown, text, ast.parse(text, shown))
        except SyntaxError as error:
            raise OnboardError(
                f"{shown}:{error.lineno}: {error.msg}", hint="Generate the file again"
            ) from error

    def without_class(self, name: str) -> Source:
        """Return the file as it would be without a top-level class; lines keep their numbers."""
        body = [
            node
            for node in self.tree.body
            if not (isinstance(node, ast.ClassDef) and node.name == name)
        ]
        return Source(self.path, self.text, ast.Module(body, []))

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the file."""
        return self.text.splitlines()

    def place(self, line: int) -> str:
        """Return `file:line: text`."""
        return (
            f"{self.path}:{line}: {self.lines[line - 1].strip() if line <= len(self.lines) else ''}"
        )

    def places(self, nodes: Iterable[ast.AST]) -> list[str]:
        """Return the places where `nodes` begin, in order, a line once."""
        return [self.place(line) for line in sorted({node.lineno for node in nodes})]  # type: ignore[attr-defined]

    def all(self, kind: type[N], inside: ast.AST | None = None) -> Iterator[N]:
        """Yield every node of a kind."""
        return (node for node in nodes_inside(inside or self.tree) if isinstance(node, kind))

    def classes(self) -> dict[str, ast.ClassDef]:
        """Return the top-level classes by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    def functions(self, inside: ast.AST | None = None) -> dict[str, Function]:
        """Return the functions of the module, or the methods of a class, by name."""
        body = (inside or self.tree).body  # type: ignore[attr-defined]
        return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}

    def forwards(self) -> dict[str, Function]:
        """Return each class's `forward`, by class name."""
        methods = {name: self.functions(node) for name, node in self.classes().items()}
        return {name: found["forward"] for name, found in methods.items() if "forward" in found}

    def calls(self, test: Callable[[str], bool], inside: ast.AST | None = None) -> list[ast.Call]:
        """Return the calls whose dotted name passes `test`."""
        return [node for node in self.all(ast.Call, inside) if test(dotted(node.func))]

    def assigned(self, value: ast.expr) -> str | None:
        """Return the attribute that a value is assigned to, None without one."""
        targets = [node.targets[0] for node in self.all(ast.Assign) if node.value is value]
        return next((target.attr for target in targets if isinstance(target, ast.Attribute)), None)

    def named(self, pattern: str, inside: ast.AST | None = None) -> list[ast.AST]:
        """Return the names, attributes and keyword arguments in whose own name the `pattern` is
        found.
        """
        return [node for node in self.all(ast.AST, inside) if re.search(pattern, own_name(node))]


@lru_cache(maxsize=1 << 12)
def nodes_inside(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return a node and those inside it, as `ast.walk` does, of a tree that nobody changes: each of
    a checklist's items looks through the same.
    """
    return tuple(ast.walk(tree))


@dataclass(frozen=True)
class Outcome:
    """Whether an item passed, and the places that show it."""

    passed: bool
    evidence: list[str]


def forbid(source: Source, found: Iterable[ast.AST]) -> Outcome:
    """Pass when nothing was found."""
    places = source.places(found)
    return Outcome(not places, places or [f"{source.path}:1-{len(source.lines)}: none found"])


def require(source: Source, found: Iterable[ast.AST], missing: str) -> Outcome:
    """Pass when something was found; say what is `missing` otherwise."""
    places = source.places(found)
    return Outcome(bool(places), places or [f"{source.path}:1: {missing}"])


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for an attribute chain, the name for a name, "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := dotted(node.value)) else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def own_name(node: ast.AST) -> str:
    """Return the name that a node itself brings in (not that of its children)."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.keyword):
        return node.arg or ""
    return node.id if isinstance(node, ast.Name) else ""


def parameters(function: Function) -> list[ast.arg]:
    """Return all parameters of a method but `self`, `*args` and `**kwargs` included."""
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return [arg for arg in every if arg is not None and arg.arg != "self"]


def required(function: Function) -> list[ast.arg]:
    """Return the positional parameters that have no default."""
    args = [*function.args.posonlyargs, *function.args.args]
    return args[: len(args) - len(function.args.defaults)]


def definitions(source: Source) -> dict[str, ast.AST]:
    """Return functions by name, methods by `Class.method`, and what stands outside of them by ""
    and `Class.`.
    """
    return {name: part for body, owner in _bodies(source) for name, part in _split(body, owner)}


def _bodies(source: Source) -> Iterator[tuple[list[ast.stmt], str]]:
    yield source.tree.body, ""
    for name, node in source.classes().items():
        yield node.body, f"{name}."


def _split(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, ast.AST]]:
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    yield from ((owner + node.name, node) for node in functions)
    rest = [node for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    yield owner, ast.Module(rest, [])


def shape(node: ast.AST) -> str:
    """Return what tells two pieces of code apart, whatever their comments, docstrings and layout
    are.
    """
    return ast.dump(_WithoutDocstrings().visit(deepcopy(node)))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST:
        body = getattr(node, "body", None)
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and body
            and ast.get_docstring(node) is not None
        ):
            node.body = body[1:]
        return self.generic_visit(node)

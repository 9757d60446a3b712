"""Checklist, part E, the whole: the tests are the generated ones, or ask more, of the known suite.

What a text asks cannot be told from the names in it. What is generated is known to ask for
everything, so that a file is held against it, statement by statement; comments, docstrings and
layout do not count. The suite is known by its digest.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from onboard.review.checklist import Subject, contract
from onboard.review.family_class import literal, suite_names, suite_value
from onboard.review.python_source import Outcome, Source, dotted, forbid, require, shape

SUITE_DIGEST = "ed0613b6f92f6090336c2875de50e1046af22cc2a6a3371ec66631c7b1a7959e"
"""SHA-256 of the suite that part E was written for. Whoever changes the suite reads each item again
and then writes the new digest here.
"""

_AT_MOST, _AT_LEAST = {"cpu_float32"}, {"new_tokens"}
"""Values of the suite of which a test file may ask more: lower limits, longer texts."""
_CHANGING = {"delattr", "eval", "exec", "globals", "locals", "monkeypatch", "setattr", "vars"}
_FOR_MORE = {"import pytest", "import torch"}
"""What a test file may import for tests of its own."""


def _as_generated(subject: Subject) -> Outcome:
    made = subject.generated_tests
    if made is None:
        where = subject.test.path
        return Outcome(
            False, [f"{where}:1: from this spec no tests are generated, to compare these with"]
        )
    known = suite_names(subject) | {name for node in _statements(made) for name in _bound(node)}
    evidence = list(
        _differences(
            subject.test,
            _statements(subject.test),
            _statements(made),
            lambda node: _asks_more(node, subject, known),
        )
    )
    return Outcome(False, evidence) if evidence else forbid(subject.test, [])


def _differences(
    source: Source,
    found: list[ast.stmt],
    wanted: list[ast.stmt],
    adds: Callable[[ast.stmt], bool],
) -> Iterator[str]:
    """Yield where statements differ from the wanted ones: the first place, and all that comes
    behind them but for what `adds` takes.
    """
    for mine, theirs in zip_longest(found, wanted):
        if mine is None:
            yield f"{source.path}:{len(source.lines)}: it ends without `{_shown(theirs)}`"
            return
        if theirs is None:
            break
        if _is_one_class(mine, theirs):
            inside = list(_differences(source, _code(mine), _code(theirs), adds))
            yield from inside
            if inside:
                return
        elif shape(mine) != shape(theirs):
            yield f"{source.place(_difference(mine, theirs))} (generated: `{_shown(theirs)}`)"
            return
    yield from source.places(node for node in found[len(wanted) :] if not adds(node))


def _statements(source: Source) -> list[ast.stmt]:
    return [node for node in _code(source.tree) if ast.unparse(node) not in _FOR_MORE]


def _code(node: ast.AST) -> list[ast.stmt]:
    """The statements of a module or a class but its docstring."""
    body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
    return body[ast.get_docstring(node) is not None :]  # type: ignore[arg-type]


def _is_one_class(mine: ast.stmt, theirs: ast.stmt) -> bool:
    """Whether two statements are classes that differ in nothing but what stands in them."""
    classes = isinstance(mine, ast.ClassDef) and isinstance(theirs, ast.ClassDef)
    return classes and _header(mine) == _header(theirs)


def _header(node: ast.stmt) -> list[str]:
    parts = [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt)]
    return [node.name, *map(shape, parts)] if isinstance(node, ast.ClassDef) else []


def _asks_more(node: ast.stmt, subject: Subject, known: set[str]) -> bool:
    """Whether a statement behind the generated ones is one more test, or a stricter value of the
    suite.
    """
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            given = suite_value(subject, name)
            return (
                given is not None
                and given.value is not None
                and _is_stricter(name, literal(value), literal(given.value))
            )
    return _only_adds(node, known)


def _is_stricter(name: str, mine: Any, theirs: Any) -> bool:
    if name == "gpu_bfloat16" and isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(
            _is_number(mine[key]) and mine[key] <= theirs[key] for key in mine
        )
    if not (_is_number(mine) and _is_number(theirs)):
        return False
    return (
        bool(mine <= theirs)
        if name in _AT_MOST
        else bool(mine >= theirs)
        if name in _AT_LEAST
        else False
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _difference(mine: ast.stmt, theirs: ast.stmt) -> int:
    """Return the line at which two statements begin to differ."""
    if type(mine) is not type(theirs) or getattr(mine, "name", None) != getattr(
        theirs, "name", None
    ):
        return mine.lineno
    pairs = zip(_parts(mine), _parts(theirs), strict=False)
    return next(
        (_difference(left, right) for left, right in pairs if shape(left) != shape(right)),
        mine.lineno,
    )


def _parts(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements inside one, without docstrings."""
    parts = (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt))
    return (
        part
        for part in parts
        if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
    )


def _shown(node: ast.stmt) -> str:
    return ast.unparse(node).splitlines()[0][:80]


def _bound(node: ast.stmt) -> set[str]:
    names = {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    names |= {
        alias.asname or alias.name
        for part in ast.walk(node)
        for alias in getattr(part, "names", [])
        if isinstance(alias, ast.alias)
    }
    return names | {str(node.name)} if isinstance(node, ast.ClassDef | ast.FunctionDef) else names


def _only_adds(node: ast.stmt, names: set[str]) -> bool:
    """Whether a statement behind the generated ones is one more test, which changes nothing that
    these rest on.
    """
    if (
        not isinstance(node, ast.FunctionDef)
        or not node.name.startswith("test_")
        or node.name in names
    ):
        return False
    return all(map(_is_plain, node.decorator_list)) and not any(map(_changes, ast.walk(node)))


def _is_plain(decorator: ast.expr) -> bool:
    match decorator:
        case ast.Call(func=function, args=args, keywords=[]):
            known = dotted(function) in {"pytest.mark.parametrize", "torch.no_grad"}
            return known and all(
                isinstance(arg, ast.Name) or literal(arg) is not None for arg in args
            )
    return False


def _changes(node: ast.AST) -> bool:
    if isinstance(
        node, ast.Global | ast.Nonlocal | ast.Import | ast.ImportFrom | ast.ClassDef | ast.Delete
    ):
        return True
    if isinstance(node, ast.Attribute | ast.Subscript):
        return not isinstance(node.ctx, ast.Load) or getattr(node, "attr", "").startswith("__")
    return (
        isinstance(node, ast.Name)
        and node.id in _CHANGING
        or isinstance(node, ast.arg)
        and node.arg in _CHANGING
    )


def _known_suite(subject: Subject) -> Outcome:
    digest = sha256(subject.suite.text.encode()).hexdigest()
    known = subject.suite.tree.body[:1] if digest == SUITE_DIGEST else []
    return require(subject.suite, known, f"this is another suite, of digest {digest}")


GENERATED_TESTS = [
    contract("E18", "the tests are those that are generated, or ask for more", _as_generated),
    contract("E19", "the suite is the one that this checklist was written for", _known_suite),
]

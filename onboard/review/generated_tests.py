"""Checklist, part E, the whole: the tests are the generated ones, or ask more.

What a text asks cannot be told from the names in it. What is generated is known to ask for
everything, so that a file is held against it, statement by statement; comments, docstrings and
layout do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from onboard.review.checklist import Subject, contract
from onboard.review.python_source import Outcome, Source, dotted, forbid, shape

_AT_MOST, _AT_LEAST = {"CPU_FLOAT32"}, {"NEW_TOKENS"}
"""Constants of the template that may ask for more than it does: lower limits, longer texts."""
_CHANGING = {"delattr", "eval", "exec", "globals", "locals", "monkeypatch", "setattr", "vars"}


def _as_generated(subject: Subject) -> Outcome:
    source, made = subject.test, subject.generated_tests
    if made is None:
        return Outcome(
            False,
            [f"{source.path}:1: from this spec no tests are generated, to compare these with"],
        )
    found, wanted = _statements(source), _statements(made)
    for mine, theirs in zip_longest(found, wanted):
        if mine is None:
            return Outcome(
                False, [f"{source.path}:{len(source.lines)}: it ends without `{_shown(theirs)}`"]
            )
        if theirs is None:
            break
        if not _asks_as_much(mine, theirs):
            return Outcome(
                False,
                [f"{source.place(_difference(mine, theirs))} (generated: `{_shown(theirs)}`)"],
            )
    names = {name for node in wanted for name in _bound(node)}
    return forbid(source, [node for node in found[len(wanted) :] if not _only_adds(node, names)])


def _statements(source: Source) -> list[ast.stmt]:
    docstring = ast.get_docstring(source.tree) is not None
    return source.tree.body[docstring:]


def _asks_as_much(mine: ast.stmt, theirs: ast.stmt) -> bool:
    return shape(mine) == shape(theirs) or _is_stricter(mine, theirs)


def _is_stricter(mine: ast.stmt, theirs: ast.stmt) -> bool:
    match mine, theirs:
        case ast.Assign(targets=[ast.Name(id=name)]), ast.Assign(targets=[ast.Name(id=other)]) if (
            name == other
        ):
            return _is_stricter_value(name, _literal(mine.value), _literal(theirs.value))
    return False


def _is_stricter_value(name: str, mine: Any, theirs: Any) -> bool:
    if name == "GPU_BFLOAT16" and isinstance(mine, dict) and isinstance(theirs, dict):
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


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


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
                isinstance(arg, ast.Name) or _literal(arg) is not None for arg in args
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


GENERATED_TESTS = [
    contract("E18", "the tests are those that are generated, or ask for more", _as_generated)
]

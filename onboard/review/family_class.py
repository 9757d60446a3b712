"""The class of a test file that inherits the suite: what it says of its family, and what it would
put in the suite's place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy
from functools import lru_cache
from typing import Any

from onboard.review.checklist import Subject
from onboard.review.python_source import Function, Source, dotted

SUITES = ("EquivalenceSuite", "FirstPositionSuite")
MODULE = "onboard.testing.suite"


def family_class(subject: Subject) -> ast.ClassDef | None:
    """Return the one class that inherits a suite; None where there is none, or another one."""
    found = [
        node
        for node in subject.test.classes().values()
        if any(dotted(base) in SUITES for base in node.bases)
    ]
    return found[0] if len(found) == 1 else None


def inherits_plainly(source: Source, node: ast.ClassDef) -> bool:
    """Whether pytest takes the tests of such a class as the package has them: nothing comes before
    the suite, and its name is that of the package's.
    """
    base = dotted(node.bases[0])
    imports = [
        alias
        for each in source.all(ast.ImportFrom)
        if each.module == MODULE
        for alias in each.names
        if (alias.name, alias.asname) == (base, None)
    ]
    alone = len(node.bases) == 1 and not node.keywords and not node.decorator_list
    return alone and node.name.startswith("Test") and bindings(source, base) == imports[:1] != []


def fact(subject: Subject, name: str) -> ast.Assign | None:
    """Return the statement by which the class says something; None unless it is the only one that
    does.
    """
    owner = family_class(subject)
    found = [
        node
        for node in (owner.body if owner else [])
        if isinstance(node, ast.Assign) and [dotted(target) for target in node.targets] == [name]
    ]
    once = len(found) == len(bindings(subject.test, name)) == 1
    return found[0] if once else None


def said(subject: Subject, name: str) -> Any:
    """Return the literal value of a fact, of a call its keyword arguments; None unless all of it is
    written out.
    """
    node = fact(subject, name)
    if node is None or not isinstance(node.value, ast.Call):
        return None if node is None else literal(node.value)
    try:
        return {key.arg: _value(key.value) for key in node.value.keywords}
    except ValueError:
        return None


def literal(node: ast.expr) -> Any:
    """Return the value of a literal; None for anything else."""
    try:
        return _value(node)
    except ValueError:
        return None


def _value(node: ast.expr) -> Any:
    return ast.literal_eval(_WithoutFloatCalls().visit(deepcopy(node)))


class _WithoutFloatCalls(ast.NodeTransformer):
    """Writes `float("inf")`, which has no literal, as the text that it is made from."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        is_float = (
            dotted(node.func) == "float"
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Constant)
        )
        return node.args[0] if is_float else node


def bindings(source: Source, name: str) -> list[ast.AST]:
    """Return what binds a name or an attribute of that name; a function's own variables do not
    count.
    """
    stored = [
        node
        for node in source.all(ast.Attribute)
        if node.attr == name and not isinstance(node.ctx, ast.Load)
    ]
    return [*(node for node in _outside(source.tree) if _binds(node, name)), *stored]


def _binds(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(id=bound, ctx=ast.Store() | ast.Del()):
            return bound == name
        case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound):
            return bound == name
        case ast.ClassDef(name=bound):
            return bound == name
        case ast.alias(name=imported, asname=bound):
            return (bound or imported) == name
    return False


@lru_cache(maxsize=64)
def _outside(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a module and its classes without those inside of functions."""
    return tuple(_descended(tree))


def _descended(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _descended(child)


def suite_value(subject: Subject, name: str) -> ast.AnnAssign | None:
    """Return the statement by which the suite gives a value to one of its names."""
    owner = subject.suite.classes().get(SUITES[0])
    found = (node for node in (owner.body if owner else []) if isinstance(node, ast.AnnAssign))
    return next((node for node in found if dotted(node.target) == name and node.value), None)


def suite_methods(subject: Subject) -> dict[str, Function]:
    """Return the methods of the suites by name."""
    classes = subject.suite.classes()
    return {
        name: node
        for suite in SUITES
        if suite in classes
        for name, node in subject.suite.functions(classes[suite]).items()
    }


def suite_names(subject: Subject) -> set[str]:
    """Return every name that the suites and what they make of a model have."""
    owners = [node for node in subject.suite.tree.body if isinstance(node, ast.ClassDef)]
    values = {
        dotted(node.target)
        for owner in owners
        for node in owner.body
        if isinstance(node, ast.AnnAssign)
    }
    return values | {name for owner in owners for name in subject.suite.functions(owner)}


def tests_of(functions: dict[str, Function]) -> dict[str, Function]:
    """Return those that are tests."""
    return {name: node for name, node in functions.items() if name.startswith("test_")}


def added_tests(subject: Subject) -> list[Function]:
    """Return the tests that a test file has besides the suite's."""
    owner = family_class(subject)
    methods = tests_of(subject.test.functions(owner)) if owner else {}
    return [*methods.values(), *tests_of(subject.test.functions()).values()]

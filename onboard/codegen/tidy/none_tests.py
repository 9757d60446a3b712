"""Questions in `__init__` whether an argument is None, where every call passes one that is none."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy

_NUMBERS = ("int", "float", "len", "round", "str", "list", "tuple")


def without_none_tests(init: Sequence[ast.stmt], given: set[str]) -> list[ast.stmt]:
    """Return the statements of an `__init__` without the sides of conditions for a None in place of
    `given`.
    """
    out: list[ast.stmt] = []
    for statement in init:
        tested = _Answered(given).visit(deepcopy(statement)) if given else deepcopy(statement)
        out += tested if isinstance(tested, list) else [tested]
        given = given - {key for item in out[-1:] for key in _assigned(item)}
    return out


def values_for_none(init: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the fields of the config that an `__init__` takes for arguments that are None: `size`
    of `self.size = config.size if size is None else size`.
    """
    found: dict[str, ast.expr] = {}
    for statement in init:
        match statement:
            case ast.Assign(
                value=ast.IfExp(
                    test=ast.Compare(
                        left=ast.Name(id=key),
                        ops=[ast.Is()],
                        comparators=[ast.Constant(value=None)],
                    ),
                    body=ast.Attribute(value=ast.Name(id="config")) as value,
                    orelse=ast.Name(id=given),
                ),
            ) if key == given:
                found[key] = value
    stored = [key for statement in init for key in _assigned(statement)]
    return {key: value for key, value in found.items() if stored.count(key) <= 1}


def is_never_none(value: ast.expr, is_set: Callable[[str], bool]) -> bool:
    """Whether an expression is not None; `is_set` says so of a field of `config`."""
    match value:
        case ast.Constant(value=constant):
            return constant is not None
        case ast.BinOp() | ast.JoinedStr() | ast.Compare() | ast.List() | ast.Tuple() | ast.Dict():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _NUMBERS
        case ast.Attribute(value=ast.Name(id="config"), attr=field):
            return is_set(field)
    return False


def _assigned(statement: ast.stmt) -> Iterator[str]:
    """Yield the variables that a statement may give another value, which is not their own one."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=variable)], value=ast.Name(id=own)) if variable == own:
            return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id


class _Answered(ast.NodeTransformer):
    def __init__(self, given: set[str]) -> None:
        self.given = given

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        answer = self._answer(node.test)
        return node if answer is None else node.body if answer else node.orelse

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        if self.given.intersection(_assigned(node)):
            return node  # what is asked of a variable in there may be of its new value
        self.generic_visit(node)
        answer = self._answer(node.test)
        return node if answer is None else node.body if answer else node.orelse

    def visit_For(self, node: ast.For) -> ast.stmt:
        return node

    def visit_While(self, node: ast.While) -> ast.stmt:
        return node

    def _answer(self, test: ast.expr) -> bool | None:
        match test:
            case ast.Compare(
                left=ast.Name(id=key), ops=[op], comparators=[ast.Constant(value=None)]
            ):
                if key in self.given and isinstance(op, ast.Is | ast.IsNot):
                    return isinstance(op, ast.IsNot)
        return None

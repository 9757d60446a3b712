"""What the names in a function stand for: followed through assignments, loops and unpacking."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from onboard.review.python_source import Function, dotted


class Dataflow:
    """The bindings of one function; nested functions are not looked into, for nothing says that
    they are called.
    """

    def __init__(self, function: Function) -> None:
        self.nodes = list(_run(function))
        self._values: dict[str, list[ast.expr]] = {}
        for targets, value in map(_binding, self.nodes):
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        self._values.setdefault(part.id, []).append(value)
        self._unpacked = {part.id for node in self.nodes for part in _unpacked(node)}

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls by these dotted names that running the function comes by."""
        return [
            node for node in self.nodes if isinstance(node, ast.Call) and dotted(node.func) in names
        ]

    def origin(self, node: ast.expr) -> ast.expr:
        """Return what a name that is bound once stands for; anything else as it is."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id not in seen | self._unpacked:
            seen.add(node.id)
            values = self._values.get(node.id, [])
            if len(values) != 1:
                break
            node = values[0]
        return node

    def called(self, node: ast.expr) -> str:
        """Return the dotted name of the call that a value comes from, "" where it is no call's."""
        origin = self.origin(node)
        return dotted(origin.func) if isinstance(origin, ast.Call) else ""

    def sources(self, node: ast.expr) -> set[str]:
        """Return the dotted names of all calls that a value can depend on."""
        pending, seen, found = [node], set(), set()
        while pending:
            for part in ast.walk(pending.pop()):
                if isinstance(part, ast.Call):
                    found.add(dotted(part.func))
                if isinstance(part, ast.Name) and part.id not in seen:
                    seen.add(part.id)
                    pending += self._values.get(part.id, [])
        return found

    def same(self, left: ast.expr, right: ast.expr) -> bool:
        """Whether two expressions are one and the same value."""
        return ast.dump(self.origin(left)) == ast.dump(self.origin(right))


def _run(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes that running a function comes by; not what is behind a return or a constant
    condition.
    """
    ends = next(
        (n for n, node in enumerate(function.body, 1) if isinstance(node, ast.Return | ast.Raise)),
        None,
    )
    pending: list[ast.AST] = list(reversed(function.body[:ends]))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        yield node
        never = isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Constant)
        pending += [] if never else reversed(list(ast.iter_child_nodes(node)))


def _binding(node: ast.AST) -> tuple[list[ast.expr], ast.expr]:
    match node:
        case ast.Assign(targets=targets, value=value):
            return targets, value
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.NamedExpr(target=target, value=value)
        ):
            return [target], value
        case ast.AugAssign(target=target, value=value):
            return [target], value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            return [target], value
    return [], ast.Constant(None)


def _unpacked(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the names that are one of several, or one after another: their values are not what they
    are bound to.
    """
    targets, _ = _binding(node)
    for target in targets:
        if not isinstance(target, ast.Name) or isinstance(
            node, ast.For | ast.comprehension | ast.AugAssign
        ):
            yield from (part for part in ast.walk(target) if isinstance(part, ast.Name))

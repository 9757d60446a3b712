"""New shapes and types of a value where it is used next, and functions of tensors as their
methods.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.codegen.tidy.lines import lines_of
from onboard.codegen.translate.language.trees.cleanup import places_read

_SHAPES = (
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "transpose",
    "contiguous",
    "squeeze",
    "unsqueeze",
    "to",
    "float",
    "type_as",
)
_PARTS = ("split", "chunk")


def folded(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements in which a value gets its new shape or type where the next statement uses
    it, as long as that one keeps its lines; `body` stays as it is.

    `x = x.flatten(2); return self.proj(x)` is `return self.proj(x.flatten(2))`.
    """
    out: list[ast.stmt] = []
    for index, statement in enumerate(body):
        joined = _joined(out[-1], statement, body[index + 1 :]) if out else None
        if joined is not None:
            out[-1] = joined
        else:
            out.append(deepcopy(statement))
    return out


def _joined(
    first: ast.stmt, second: ast.stmt, after: Sequence[ast.stmt]
) -> ast.Assign | ast.Return | None:
    """Return two statements as one; None where that changes something or takes more lines."""
    match first, second:
        case (
            ast.Assign(targets=[ast.Name(id=variable)], value=ast.Call() as value),
            ast.Assign() | ast.Return(),
        ) if not isinstance(second.value, ast.Tuple | None) and (
            _is_shape(value) or _shapes(second.value, variable)
        ):
            pass
        case _:
            return None
    if any(isinstance(node, ast.comprehension | ast.Lambda) for node in ast.walk(second)):
        return None
    ended = isinstance(second, ast.Return) or ast.unparse(second.targets[0]) == variable
    if list(places_read(second)).count(variable) != 1 or not (
        ended or variable not in {place for item in after for place in places_read(item)}
    ):
        return None
    joined = ast.copy_location(_Put(variable, value).visit(deepcopy(second)), first)
    assert isinstance(joined, ast.Assign | ast.Return)
    return joined if lines_of([joined]) <= lines_of([second]) else None


def _is_shape(value: ast.expr) -> bool:
    """Whether a value is another one in a new shape or type."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr=attr)):
            return attr in _SHAPES
    return False


def _shapes(value: ast.expr, variable: str) -> bool:
    """Whether a value is that of a variable in a new shape or type."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=attr)):
            return owner == variable and attr in _SHAPES
    return False


class _Put(ast.NodeTransformer):
    def __init__(self, variable: str, value: ast.expr) -> None:
        self.variable, self.value = variable, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        put = node.id == self.variable and isinstance(node.ctx, ast.Load)
        return deepcopy(self.value) if put else node


def with_methods(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements with `x.split(...)` for `torch.split(x, ...)`; `body` stays as it is."""
    return [_Methods().visit(deepcopy(statement)) for statement in body]


class _Methods(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr=attr),
                args=[ast.Name() as tensor, *args],
            ) if attr in _PARTS:
                method = ast.Attribute(tensor, attr, ast.Load())
                return ast.copy_location(ast.Call(method, args, node.keywords), node)
        return node

"""Lists that a constructor keeps in an attribute until it makes a list of modules of them."""

from __future__ import annotations

import ast
from copy import deepcopy


def with_local_lists(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return statements with a variable in place of `self.x` from `self.x = []` to
    `self.x = nn.ModuleList(self.x)`.
    """
    out = list(body)
    for first, statement in enumerate(body):
        attr = _emptied(statement)
        ends = [place for place in range(first + 1, len(body)) if _modules_of(body[place]) == attr]
        if attr is None or not ends or any(_emptied(each) == attr for each in body[first + 1 :]):
            continue
        named = _Named(attr, _free(attr, body))
        out[first : ends[0]] = [named.visit(deepcopy(each)) for each in out[first : ends[0]]]
        last = deepcopy(out[ends[0]])
        assert isinstance(last, ast.Assign)
        last.value = named.visit(last.value)
        out[ends[0]] = last
    return out


def _emptied(statement: ast.stmt) -> str | None:
    """Return x of `self.x = []`."""
    match statement:
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)], value=ast.List(elts=[])
        ):
            return attr
    return None


def _modules_of(statement: ast.stmt) -> str | None:
    """Return x of `self.x = nn.ModuleList(self.x)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)],
            value=ast.Call(
                func=ast.Attribute(attr="ModuleList") | ast.Name(id="ModuleList"),
                args=[ast.Attribute(value=ast.Name(id="self"), attr=other)],
            ),
        ) if attr == other:
            return attr
    return None


def _free(attr: str, body: list[ast.stmt]) -> str:
    names = {node.id for each in body for node in ast.walk(each) if isinstance(node, ast.Name)}
    return attr if attr not in names else f"{attr}_made"


class _Named(ast.NodeTransformer):
    """Gives an attribute of `self` a variable's name."""

    def __init__(self, attr: str, variable: str) -> None:
        self.attr, self.variable = attr, variable

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Rename it."""
        self.generic_visit(node)
        if node.attr == self.attr and isinstance(node.value, ast.Name) and node.value.id == "self":
            return ast.copy_location(ast.Name(self.variable, node.ctx), node)
        return node

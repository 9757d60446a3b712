"""Lists that a constructor keeps in an attribute until it makes a list of modules of them."""

from __future__ import annotations

import ast
from copy import deepcopy


def with_local_lists(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return statements with a variable in place of `self.x` from `self.x = []` to
    `self.x = nn.ModuleList(self.x)`, or until it has all of its texts.
    """
    out = list(body)
    full: dict[int, ast.stmt] = {}
    for first, statement in enumerate(body):
        attr = _emptied(statement)
        ends = [place for place in range(first + 1, len(body)) if _modules_of(body[place]) == attr]
        if attr is None or any(_emptied(each) == attr for each in body[first + 1 :]):
            continue
        named = _Named(attr, _free(attr, body))
        if not ends and (filled := _filled(attr, body)):
            out[first : filled + 1] = [
                named.visit(deepcopy(each)) for each in out[first : filled + 1]
            ]
            whole = ast.copy_location(
                ast.parse(f"self.{attr} = {named.variable}").body[0], statement
            )
            full[filled + 1] = whole
        if not ends:
            continue
        out[first : ends[0]] = [named.visit(deepcopy(each)) for each in out[first : ends[0]]]
        last = deepcopy(out[ends[0]])
        assert isinstance(last, ast.Assign)
        last.value = named.visit(last.value)
        out[ends[0]] = last
    for place in sorted(full, reverse=True):
        out.insert(place, full[place])
    return out


def _filled(attr: str, body: list[ast.stmt]) -> int:
    """Return the number of the last statement that adds a text to a list, if nothing else is added."""
    last = 0
    for place, statement in enumerate(body):
        for node in ast.walk(statement):
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Attribute(value=ast.Name(id="self"), attr=each), attr="append"
                    ),
                    args=[item],
                ) if each == attr:
                    if not _is_text(item, statement):
                        return 0
                    last = place
    return last


def _is_text(item: ast.expr, statement: ast.stmt) -> bool:
    """Whether an expression makes a text, or names one that a statement makes."""
    match item:
        case ast.JoinedStr():
            return True
        case ast.Name(id=key):
            made = [each for each in ast.walk(statement) if isinstance(each, ast.Assign)]
            texts = [each.value for each in made if ast.unparse(each.targets[0]) == key]
            return len(texts) == 1 and isinstance(texts[0], ast.JoinedStr)
    return False


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

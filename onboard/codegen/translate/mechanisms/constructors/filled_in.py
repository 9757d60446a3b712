"""A default that a constructor fills into a dict of the config: `if "x" not in d: d["x"] = value`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.analysis.source import find_method, sources_of
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import attribute, call, same_code


class FilledIn(Mechanism):
    """The constructor reads the item, or the value, from there on; the config stays as it is."""

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """What comes behind, without the change; None where others may read what it has changed."""
        if frame.kind != "init" or not frame.translator.specialised:
            return None
        match statements[0]:
            case ast.If(
                test=ast.Compare(
                    left=ast.Constant(value=str() as key), ops=[ast.NotIn()], comparators=[table]
                ),
                body=[
                    ast.Assign(
                        targets=[ast.Subscript(value=filled, slice=ast.Constant(value=other))],
                        value=value,
                    )
                ],
                orelse=[],
            ) if key == other and same_code(table, filled) and _is_field(table):
                if _is_read_elsewhere(key, frame):
                    return None
                whole = _Filled(table, key, value)
                return [whole.visit(deepcopy(each)) for each in statements[1:]]
        return None


def _is_field(table: ast.expr) -> bool:
    """Whether an expression is a field of the config."""
    match table:
        case ast.Attribute(value=owner):
            return ast.unparse(owner) in ("config", "self.config")
    return False


def _is_read_elsewhere(key: str, frame: Frame) -> bool:
    """Whether code of the model but this constructor has the key as a text."""
    found = frame.owner and find_method(frame.owner, "__init__")
    inside = {id(node) for node in ast.walk(found[1])} if found else set()
    nodes = (node for file in sources_of(frame.translator.model) for node in ast.walk(file.tree))
    return any(
        isinstance(node, ast.Constant) and node.value == key and id(node) not in inside
        for node in nodes
    )


class _Filled(ast.NodeTransformer):
    """Reads an item of a table as if the table had it."""

    def __init__(self, table: ast.expr, key: str, value: ast.expr) -> None:
        self.table, self.key, self.value = table, key, value

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Replace the item."""
        self.generic_visit(node)
        match node:
            case ast.Subscript(value=table, slice=ast.Constant(value=self.key), ctx=ast.Load()):
                if same_code(table, self.table):
                    made = call(attribute(table, "get"), node.slice, deepcopy(self.value))
                    return ast.fix_missing_locations(ast.copy_location(made, node))
        return node

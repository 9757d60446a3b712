"""Members of enumerations, which model files have not: their values."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from enum import Enum
from typing import Any


class MembersAsValues(ast.NodeTransformer):
    """Writes the values of members of enumerations for these: `Kind(value)` checks, and gives one."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.namespace = namespace

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Write what is looked up."""
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id=key), args=[value], keywords=[]) if self._values(key):
                return value
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Write the value of a member."""
        match node:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id=key)) as member, attr="value"):
                return self.visit_Attribute(member) if self._values(key) else node
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id=key), attr=attr), attr="name"):
                found = attr in self._values(key)
                return ast.copy_location(ast.Constant(attr), node) if found else node
            case ast.Attribute(value=ast.Call(func=ast.Name(id=key)) as call, attr="value"):
                return self.visit_Call(call) if self._values(key) else self.generic_visit(node)
            case ast.Attribute(value=ast.Name(id=key), attr=attr) if attr in self._values(key):
                return ast.copy_location(ast.Constant(self._values(key)[attr]), node)
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Compare by value what is compared by which member it is."""
        before = [node.left, *node.comparators]
        self.generic_visit(node)
        if any(
            old is not new for old, new in zip(before, [node.left, *node.comparators], strict=True)
        ):
            equal: dict[type[ast.cmpop], ast.cmpop] = {ast.Is: ast.Eq(), ast.IsNot: ast.NotEq()}
            node.ops = [equal.get(type(op), op) for op in node.ops]
        return node

    def _values(self, key: str) -> dict[str, bool | int | float | str]:
        """Return the plain values of an enumeration's members; none for anything else."""
        found = self.namespace.get(key)
        if not (isinstance(found, type) and issubclass(found, Enum)):
            return {}
        values = {member.name: member.value for member in found}
        plain = all(isinstance(value, bool | int | float | str) for value in values.values())
        return values if plain else {}

"""Conditions without parentheses that say nothing: `a and (b and c)` is `a and b and c`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy


def flat(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements whose conditions hold no conditions of the same kind; `body` stays as it
    is.
    """
    return [_Flat().visit(deepcopy(statement)) for statement in body]


class _Flat(ast.NodeTransformer):
    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        parts = [
            value.values
            if isinstance(value, ast.BoolOp) and type(value.op) is type(node.op)
            else [value]
            for value in node.values
        ]
        return ast.copy_location(
            ast.BoolOp(node.op, [item for part in parts for item in part]), node
        )

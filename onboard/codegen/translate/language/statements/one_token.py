"""Branches that several tokens take and one alone does not, for a mask that hides nothing from it."""

from __future__ import annotations

import ast

from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.values import Code, Mask, Value


def only_masks(test: Value, body: list[ast.stmt], start: Env, after: Env) -> bool:
    """Whether a branch is taken where a size is not 1, and leaves nothing but what is masked: then
    it may be taken always.
    """
    if not isinstance(test, Code) or not _is_of_several(test.expr):
        return False
    new = [
        isinstance(item, ast.Assign)
        and all(
            isinstance(each, ast.Name) and _is_new(each.id, start, after) for each in item.targets
        )
        for item in body
    ]
    changed = [
        value
        for key, value in after.values.items()
        if key in start.values and not value.equals(start.values[key])
    ]
    masked = [
        isinstance(item, Mask) or (isinstance(item, Code) and item.masked) for item in changed
    ]
    return all(new) and bool(masked) and all(masked)


def _is_new(variable: str, start: Env, after: Env) -> bool:
    """Whether nothing behind the branch reads what it assigns to a variable that was there before."""
    return variable not in start.values or isinstance(after.values.get(variable), Mask)


def _is_of_several(test: ast.expr) -> bool:
    match test:
        case ast.UnaryOp(
            op=ast.Not(), operand=ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=1)])
        ):
            return True
        case ast.Compare(ops=[ast.NotEq() | ast.Gt()], comparators=[ast.Constant(value=1)]):
            return True
    return False

"""`if torch.isnan(x).any(): x = ...`: an exported graph has no branch on what a tensor holds, and
chooses the value instead.
"""

from __future__ import annotations

import ast
from functools import reduce

from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.statements.assign import store
from onboard.codegen.translate.language.trees.syntax import attribute, call, name
from onboard.codegen.translate.language.values import Code, Value

_ASKED = ("isnan", "isinf", "isfinite")


def chosen_instead(node: ast.If, test: Value, frame: Frame) -> bool:
    """Take a branch of repositories' code that gives a tensor other values where some of its
    numbers are none; return whether this is one.
    """
    if not frame.translator.specialised or type(test) is not Code or test.static:
        return False
    match node:
        case ast.If(body=[ast.Assign(targets=[ast.Name() as target], value=value)], orelse=[]):
            asked = _as_one(test.expr)
            kept = frame.evaluate(ast.copy_location(name(target.id), node))
            if asked is None or type(kept) is not Code or kept.transposed:
                return False
            made = frame.evaluate(value)
            where = call(attribute(name("torch"), "where"), asked, made.code(), kept.code())
            store(target, Code(where), frame, node)
            return True
    return False


def _as_one(test: ast.expr) -> ast.expr | None:
    """Return a test of what numbers tensors hold as a tensor of one truth value; None for others."""
    match test:
        case ast.BoolOp(op=op, values=values):
            parts = [_as_one(item) for item in values]
            both: ast.operator = ast.BitOr() if isinstance(op, ast.Or) else ast.BitAnd()
            known = [part for part in parts if part is not None]
            whole = reduce(lambda one, other: ast.BinOp(one, both, other), known) if known else None
            return whole if len(known) == len(parts) else None
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            part = _as_one(operand)
            return None if part is None else ast.UnaryOp(ast.Invert(), part)
        case ast.Call(func=ast.Attribute(value=asked, attr="any" | "all"), args=[], keywords=[]):
            calls = [item.func for item in ast.walk(asked) if isinstance(item, ast.Call)]
            names = {item.attr for item in calls if isinstance(item, ast.Attribute)}
            return test if names & {*_ASKED} else None
    return None

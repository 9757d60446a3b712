"""Tests for half precision, under which code takes faster paths to the same."""

from __future__ import annotations

import ast

import torch

from onboard.analysis.behaviour.half import same_in_half
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.values import Code, Items, Known, Value

_HALVES = {torch.float16, torch.bfloat16}


def is_of_a_half(op: ast.cmpop, left: Value, right: Value, frame: Frame) -> Known | None:
    """Return that `x.dtype in (torch.float16, torch.bfloat16)` does not hold, where the model
    computes the same if it does; generated code has one path for all dtypes.
    """
    if not isinstance(op, ast.In | ast.NotIn) or not frame.translator.specialised:
        return None
    match left, right:
        case Code(expr=ast.Attribute(attr="dtype"), static=False), Items(items=items):
            named = {item.obj for item in items if isinstance(item, Global)}
            if named == _HALVES and same_in_half(frame.translator.model):
                return Known(isinstance(op, ast.NotIn))
    return None


def only_in_half(test: Value, frame: Frame) -> bool:
    """Whether a test holds in half precision alone, `x.dtype == torch.float16`, where the model
    computes the same: a path behind it that has no translation may be left out.
    """
    if not isinstance(test, Code) or not frame.translator.specialised:
        return False
    named = _halves_of(test.expr)
    return bool(named) and all(same_in_half(frame.translator.model, item) for item in named)


def _halves_of(test: ast.expr) -> set[torch.dtype]:
    """Return the dtypes in half precision without one of which a test does not hold; none where it
    may hold for others.
    """
    match test:
        case ast.BoolOp(op=op, values=parts):
            found = [_halves_of(part) for part in parts]
            if isinstance(op, ast.Or):
                return set().union(*found) if all(found) else set()
            return next(filter(None, found), set())
        case ast.Compare(
            left=ast.Attribute(attr="dtype"), ops=[ast.Eq()], comparators=[ast.Attribute() as right]
        ):
            return {half for half in _HALVES if ast.unparse(right) == str(half)}
    return set()

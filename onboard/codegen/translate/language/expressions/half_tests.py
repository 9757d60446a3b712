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
    """Return that `x.dtype in (torch.float16, torch.bfloat16)` does not hold, nor `x.dtype ==` one
    of them, where the model computes the same if it does; generated code has one path for all
    dtypes.
    """
    if not frame.translator.specialised:
        return None
    match op, left, right:
        case ast.In() | ast.NotIn(), Code(expr=ast.Attribute(attr="dtype"), static=False), Items():
            named = {item.obj for item in right.items if isinstance(item, Global)}
            if named == _HALVES and same_in_half(frame.translator.model):
                return Known(isinstance(op, ast.NotIn))
        case ast.Eq() | ast.NotEq(), Code(expr=ast.Attribute(attr="dtype"), static=False), Global():
            half = right.obj in _HALVES
            if half and same_in_half(frame.translator.model, right.obj):
                return Known(isinstance(op, ast.NotEq))
    return None

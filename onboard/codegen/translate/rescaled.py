"""Layers whose weights transformers divides before its first step: generated files divide what they give."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from onboard.codegen.translate.object_values import Instance
from onboard.codegen.translate.syntax import name
from onboard.codegen.translate.values import Known, Value

if TYPE_CHECKING:
    from onboard.codegen.translate.frame import Frame
    from onboard.codegen.translate.state import ClassState

LINEAR = "DividedLinear"
"""The class of `onboard.modeling` that generated files have in place of such an `nn.Linear`."""


def switched(state: ClassState, attr: str) -> Known | None:
    """Return what an attribute is from the first forward on, where that is not what `__init__` sets."""
    switches = {(cls, key): value for cls, key, value in state.translator.settled.switches}
    return Known(switches[state.cls, attr]) if (state.cls, attr) in switches else None


def divided(attr: str, value: Value, frame: Frame) -> Value:
    """Return what `__init__` assigns to `self.<attr>`, with the division of what the layer gives."""
    found = [item for item in frame.translator.settled.linears if frame.cls is not None and item.cls is frame.cls.cls]
    for item in (item for item in found if item.attr == attr):
        frame.translator.guard(ast.parse(item.test, mode="eval").body, frame)
        if item.divisor is not None and isinstance(value, Instance) and value.classes == (nn.Linear,):
            assert isinstance(value.expr, ast.Call)
            divisor = _simplified(ast.parse(item.divisor, mode="eval").body)
            called = ast.Call(name(LINEAR), [divisor, *value.expr.args], value.expr.keywords)
            return replace(value, expr=called)
    return value


def _simplified(divisor: ast.expr) -> ast.expr:
    """`int(a // b)` of whole numbers is a // b."""
    for node in ast.walk(divisor):
        for field, child in ast.iter_fields(node):
            match child:
                case ast.Call(func=ast.Name(id="int"), args=[ast.BinOp(op=ast.FloorDiv()) as inner]):
                    setattr(node, field, inner)
    return divisor

"""Layers whose weights transformers divides before its first step: generated files divide what they
give.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache

from torch import nn

from onboard.analysis.recognise.rescaled import Settled, settled
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Known, Value

LINEAR = "DividedLinear"
"""The class of `onboard.modeling` that generated files have in place of such an `nn.Linear`."""


@lru_cache(maxsize=4)
def _settled(model: nn.Module) -> Settled:
    """Keep what was found: each attribute asks for it."""
    return settled(model)


def switched(state: ClassState, attr: str, frame: Frame) -> Known | None:
    """Return what an attribute is from the first forward on, where that is not what `__init__`
    sets.
    """
    switches = {(cls, key): value for cls, key, value in _settled(frame.translator.model).switches}
    return Known(switches[state.cls, attr]) if (state.cls, attr) in switches else None


def divided(attr: str, value: Value, frame: Frame) -> Value:
    """Return what `__init__` assigns to `self.<attr>`, with the division of what the layer
    gives.
    """
    found = [
        item
        for item in _settled(frame.translator.model).linears
        if frame.cls is not None and item.cls is frame.cls.cls
    ]
    for item in (item for item in found if item.attr == attr):
        frame.translator.guard(ast.parse(item.test, mode="eval").body, frame)
        if (
            item.divisor is not None
            and isinstance(value, Instance)
            and value.classes == (nn.Linear,)
        ):
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
                case ast.Call(
                    func=ast.Name(id="int"), args=[ast.BinOp(op=ast.FloorDiv()) as inner]
                ):
                    setattr(node, field, inner)
    return divisor


class RescaledWeights(Mechanism):
    """Weights that transformers divides."""

    def own_attribute(
        self, cls: ClassState, attr: str, path: ast.expr, frame: Frame
    ) -> Value | None:
        """A switch that the first forward turns."""
        known = isinstance(cls.attributes.get(attr), Known)
        return switched(cls, attr, frame) if known and frame.kind != "init" else None

    def set_attribute(self, attr: str, value: Value, frame: Frame) -> Value | None:
        """A layer that divides what it gives."""
        changed = divided(attr, value, frame)
        return None if changed is value else changed

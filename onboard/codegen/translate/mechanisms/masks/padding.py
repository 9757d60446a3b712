"""Masks of padding, of which there is none: what code gets without a mask, or makes itself, and
what a layer does that gets a mask, or none where it has no attention.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import torch

from onboard.analysis.behaviour.lines_run import lines_run
from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.forms import ALL_TRUE, NONE_TRUE
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global, LayerMask
from onboard.codegen.translate.language.trees.syntax import attribute
from onboard.codegen.translate.language.values import Code, Items, Ones, Value
from onboard.codegen.translate.mechanisms.attention.causal import OF_MASKS


class Padding(Mechanism):
    """Masks of padding, of which there is none: all ones."""

    def unary(self, op: ast.unaryop, operand: Value) -> Value | None:
        """The opposite of what is all true is nowhere true."""
        opposite = isinstance(op, ast.Invert) and _form(operand) == ALL_TRUE
        return Code(ast.UnaryOp(op, operand.code()), form=NONE_TRUE) if opposite else None

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """`x * ones` is x."""
        return left if isinstance(op, ast.Mult) and isinstance(right, Ones) else None

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """`torch.ones((batch, length), dtype=torch.bool)`, a mask that code makes itself."""
        match args.positional, args.keywords.get("dtype"):
            case [Items(items=[_, _])], Global(obj=torch.bool) if function is torch.ones:
                return replace(plain_call(expr, args), form=ALL_TRUE)
        return None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """In another shape or dtype it is the same; where it hides nothing, nothing is filled."""
        match attr, args.positional:
            case "masked_fill", [where, _] if _form(where) == NONE_TRUE:
                return owner
        if _form(owner) in (ALL_TRUE, NONE_TRUE) and attr in OF_MASKS - {"to", "type"}:
            return replace(plain_call(attribute(owner.code(), attr), args), form=_form(owner))
        return owner if isinstance(owner, Ones) and attr in OF_MASKS else None


class LayerMasks(Mechanism):
    """`if mask is not None: ...` of a mask that some layers get: the small model of this config
    tells which layers do.
    """

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """Whether the small model, whose attention gets its masks, came to the body."""
        read = {item.id for item in ast.walk(node.test) if isinstance(item, ast.Name)}
        if not any(isinstance(frame.env.values.get(key), LayerMask) for key in read):
            return None
        asked = [item for item in ast.walk(node.test) if isinstance(item, ast.Is | ast.IsNot)]
        if not asked:
            return None
        program = frame.translator
        counts, path = lines_run(program.model, program.config), str(frame.source.path)
        body, *orelse = [counts[path, side[0].lineno] for side in (node.body, node.orelse) if side]
        if not counts[path, node.test.lineno] or (orelse and bool(body) == bool(orelse[0])):
            return None  # another class has the attention that it takes
        return bool(body)


def _form(value: Value) -> str | None:
    return value.form if isinstance(value, Code) else None

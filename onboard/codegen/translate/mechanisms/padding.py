"""Masks of padding, of which there is none: what code gets without a mask, or makes itself."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.forms import ALL_TRUE, NONE_TRUE
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import attribute
from onboard.codegen.translate.language.values import Code, Items, Value
from onboard.codegen.translate.mechanisms.attention.causal import OF_MASKS, Ones


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


def _form(value: Value) -> str | None:
    return value.form if isinstance(value, Code) else None

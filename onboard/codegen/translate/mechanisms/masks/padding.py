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
from onboard.codegen.translate.language.program.uses import Ones
from onboard.codegen.translate.language.trees.syntax import attribute
from onboard.codegen.translate.language.values import NONE, Code, Items, Mask, Value
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
    """`if mask is not None: ...` of a mask that some layers get, `if mask.shape[-2] !=
    keys.shape[-2]: ...`, and `if mask.ndim != 1: ...`: the small model of this config tells which way
    it goes.
    """

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """Whether the small model, whose attention gets its masks, came to the body."""
        asks = (_asks_for_layers, _compares_sizes, _asks_for_rank)
        if not any(each(node.test, frame) for each in asks):
            return None
        program = frame.translator
        counts, path = lines_run(program.model, program.config), str(frame.source.path)
        body, *orelse = [counts[path, side[0].lineno] for side in (node.body, node.orelse) if side]
        if not counts[path, node.test.lineno] or (orelse and bool(body) == bool(orelse[0])):
            return None  # another class has the attention that it takes
        return bool(body)


def _asks_for_layers(test: ast.expr, frame: Frame) -> bool:
    """Whether a test asks if a mask is there that some layers get."""
    nodes = [*ast.walk(test)]
    read = {item.id for item in nodes if isinstance(item, ast.Name)}
    masks = any(isinstance(frame.env.values.get(key), LayerMask) for key in read)
    return masks and any(isinstance(item, ast.Is | ast.IsNot) for item in nodes)


def _asks_for_rank(test: ast.expr, frame: Frame) -> bool:
    """Whether a test asks how many dimensions a mask has that hides nothing."""
    match test:
        case ast.Compare(
            left=ast.Attribute(value=ast.Name(id=key), attr="ndim"), comparators=[ast.Constant()]
        ):
            return _form(frame.env.values.get(key, NONE)) == ALL_TRUE
    return False


def _compares_sizes(test: ast.expr, frame: Frame) -> bool:
    """Whether a test asks if a mask has as many tokens as another tensor: without a cache it is the
    same for all texts.
    """
    for node in ast.walk(test):
        match node:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[right]):
                owners = [frame.env.values.get(_sized(side)) for side in (left, right)]
                masks = [isinstance(owner, Mask) for owner in owners]
                if any(masks) and all(isinstance(owner, Mask | Code) for owner in owners):
                    return True
    return False


def _sized(node: ast.expr) -> str:
    """Return the variable of `x.shape[i]` or `x.size(i)`; "" for anything else."""
    match node:
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=key), attr="shape")):
            return key
        case ast.Call(func=ast.Attribute(value=ast.Name(id=key), attr="size"), args=[_]):
            return key
    return ""


def _form(value: Value) -> str | None:
    return value.form if isinstance(value, Code) else None
